"""DSpark's layers, differentiable: many blocks of each text at once, every drafted token given the true one before it.

A block at place p begins with the text's token p, the anchor, and noise; position j predicts token p + 1 + j. It sees
the target's states of the window before p and all of itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from deepinfer_vllm.training.architecture import Architecture
from deepinfer_vllm.training.attention import angles, attend, latent, project_out, queries
from deepinfer_vllm.training.experts import moe
from deepinfer_vllm.training.layers import begin, collapse, rms_norm, rotate, sublayer
from deepinfer_vllm.training.parameters import Weights


@dataclass
class Blocks:
    """A blocks of G positions in each of B texts."""

    hidden: torch.Tensor  # [B, A, G, D], before the final norm
    logits: torch.Tensor  # [B, A, G, V], without the Markov head's part
    loads: dict[str, torch.Tensor]


class Draft:
    """The draft layers over `weights`, which hold the target's embedding and head too."""

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self.config, self.layers = architecture.draft.model, architecture.draft.num_layers
        self.noise, self.size = architecture.noise_token, architecture.block_size
        self.weights, self.last = weights, f"mtp.{architecture.draft.num_layers - 1}"

    def blocks(self, states: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> Blocks:
        """states [B, T, layers * D] of the target, ids [B, T], places [B, A] of anchors, each at least 1."""
        config, weights = self.config, self.weights
        main_x = states @ weights["mtp.0.main_proj.weight"].T
        main_x = rms_norm(main_x, weights["mtp.0.main_norm.weight"], config.norm_eps)
        before = places.unsqueeze(-1) - torch.arange(config.window, 0, -1)  # [B, A, window]
        own = places.unsqueeze(-1) + torch.arange(self.size)
        allowed = torch.cat([before >= 0, torch.ones_like(own, dtype=torch.bool)], -1).flatten(0, 1).unsqueeze(1)
        before, turn = before.clamp(min=0), angles(own, config, ratio=0)
        block = torch.full_like(own, self.noise)
        block[..., 0] = ids.gather(1, places)
        streams, pre = begin(weights["embed.weight"][block], config)
        loads: dict[str, torch.Tensor] = {}
        for layer in range(self.layers):
            name = f"mtp.{layer}"
            rows = latent(main_x, weights, f"{name}.attn", config)
            rows = rotate(rows, angles(torch.arange(ids.shape[1]), config, ratio=0))
            seen = rows[torch.arange(len(ids)).view(-1, 1, 1), before]
            block_attention = partial(self._attention, name=f"{name}.attn", seen=seen, allowed=allowed, turn=turn)
            streams, pre = sublayer(streams, pre, weights, name, "attn", config, block_attention)
            experts = partial(moe, weights=weights, name=f"{name}.ffn", config=config, loads=loads)
            streams, pre = sublayer(streams, pre, weights, name, "ffn", config, experts)
        hidden = collapse(streams, pre)
        normed = rms_norm(hidden, weights[f"{self.last}.norm.weight"], config.norm_eps)
        return Blocks(hidden, normed @ weights["head.weight"].T, loads)

    def _attention(
        self, x: torch.Tensor, name: str, seen: torch.Tensor, allowed: torch.Tensor, turn: torch.Tensor
    ) -> torch.Tensor:
        """x [B, A, G, D] over rows seen [B, A, window, d] and its own; allowed bool [B * A, 1, window + G]."""
        query = rotate(queries(x, self.weights, name, self.config)[1], turn.unsqueeze(-2))
        kv = torch.cat([seen, rotate(latent(x, self.weights, name, self.config), turn)], dim=2)
        sink = self.weights[f"{name}.attn_sink"]
        out = attend(query.flatten(0, 1), kv.flatten(0, 1), allowed.expand(-1, self.size, -1), sink)
        out = rotate(out.view_as(query), turn.unsqueeze(-2), inverse=True)
        return project_out(out, self.weights, name, self.config)

    def markov(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [...] to (their embedding [..., rank], what they add to the next one's logits [..., V])."""
        embedded = self.weights[f"{self.last}.markov_head.embed.weight"][previous]
        return embedded, embedded @ self.weights[f"{self.last}.markov_head.head.weight"].T

    def confidence(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Logits [...] of hidden [..., D] and the Markov embedding [..., rank] of the token before."""
        proj = self.weights[f"{self.last}.confidence_head.proj.weight"][0]
        return torch.cat([hidden, embedded], dim=-1) @ proj
