"""How good the pair is on held-out texts: the target's loss, and how many drafted tokens would stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from deepinfer_vllm.training.architecture import Architecture
from deepinfer_vllm.training.batches import held_out_batch
from deepinfer_vllm.training.draft import Draft
from deepinfer_vllm.training.parameters import Weights
from deepinfer_vllm.training.target import Target
from deepinfer_vllm.training.texts import WORKLOADS


@dataclass(frozen=True)
class Scores:
    """Of one workload. Drafts are judged with the text's own tokens before each, so lengths are estimates."""

    loss: float  # nats a token, of the target
    greedy: tuple[float, ...]  # share of blocks whose first 1, 2, ... tokens are the target's most likely ones
    random: tuple[float, ...]  # chance that the first 1, 2, ... tokens stand at temperature 1
    confidence: tuple[float, ...]  # the same, by the product of the confidences

    @property
    def greedy_length(self) -> float:
        """Tokens a step, the target's own included."""
        return 1 + sum(self.greedy)

    @property
    def random_length(self) -> float:
        """The same at temperature 1."""
        return 1 + sum(self.random)


@torch.no_grad()
def evaluate(architecture: Architecture, weights: Weights, rows: int = 16, length: int = 256) -> dict[str, Scores]:
    """Scores by workload over `rows` held-out texts of `length` tokens, a block at every place."""
    target, draft = Target(architecture, weights), Draft(architecture, weights)
    scores = {}
    for workload in WORKLOADS:
        ids = held_out_batch(architecture.target.vocab_size, workload, rows, length + 1)
        output = target.forward(ids[:, :-1])
        loss = functional.cross_entropy(output.logits.flatten(0, 1), ids[:, 1:].flatten())
        places = torch.arange(1, length - draft.size, 3).expand(rows, -1).contiguous()
        blocks = draft.blocks(output.states, ids[:, :-1], places)
        at, row = places.unsqueeze(-1) + torch.arange(draft.size), torch.arange(rows).view(-1, 1, 1)
        embedded, bias = draft.markov(ids[row, at])
        drafted, wanted = blocks.logits + bias, output.logits[row, at]
        same = (drafted.argmax(-1) == wanted.argmax(-1)).float()
        overlap = 1 - 0.5 * (drafted.softmax(-1) - wanted.softmax(-1)).abs().sum(-1)
        sure = draft.confidence(blocks.hidden, embedded).sigmoid()
        scores[workload] = Scores(
            float(loss), *(tuple(x.cumprod(-1).mean((0, 1)).tolist()) for x in (same, overlap, sure))
        )
    return scores
