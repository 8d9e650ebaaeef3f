"""What the draft layers learn from: the text, the target's distribution, and how far they are from it.

Weights 0.1, 0.9 and 1.0 as the DSpark paper reports them. The target is not changed by any of them.
"""

from __future__ import annotations

import torch
from torch.nn import functional

CROSS_ENTROPY, TOTAL_VARIATION, CONFIDENCE = 0.1, 0.9, 1.0


def draft_loss(
    drafted: torch.Tensor, target: torch.Tensor, following: torch.Tensor, confidence: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, acceptance [..., G]) of logits drafted and target [..., G, V], tokens following [..., G] and
    logits confidence [..., G].

    A drafted token is accepted with probability 1 - TV, TV = 0.5 * |draft - target|_1: the confidence's aim.
    """
    p = target.detach().softmax(-1)
    q = drafted.softmax(-1)
    variation = 0.5 * (q - p).abs().sum(-1)
    accepted = 1 - variation.detach()
    cross_entropy = functional.cross_entropy(drafted.flatten(0, -2), following.flatten())
    sure = functional.binary_cross_entropy_with_logits(confidence, accepted)
    loss = CROSS_ENTROPY * cross_entropy + TOTAL_VARIATION * variation.mean() + CONFIDENCE * sure
    return loss, accepted
