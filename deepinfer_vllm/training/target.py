"""The text model, differentiable: token ids to logits and to the states that the draft layers read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from deepinfer_vllm.training.architecture import Architecture
from deepinfer_vllm.training.attention import Shared, attention
from deepinfer_vllm.training.engram import Hashes, engram
from deepinfer_vllm.training.experts import moe
from deepinfer_vllm.training.layers import begin, collapse, rms_norm, sublayer
from deepinfer_vllm.training.parameters import Weights


@dataclass
class Output:
    """B texts of T tokens."""

    logits: torch.Tensor  # [B, T, V]
    states: torch.Tensor  # [B, T, draft's target layers * D]: mean streams at their entry, side by side
    index_loss: torch.Tensor  # scalar, over index sources
    loads: dict[str, torch.Tensor]  # tokens of each expert, by `layers.N.ffn`


class Target:
    """The model over `weights`, which may be parameters."""

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self.config, self.states_of = architecture.target, architecture.draft.target_layers
        self.weights = weights
        assert self.config.engram is not None, "the trained pair has Engram layers"
        self.hashes = Hashes(self.config.engram, self.config.vocab_size)

    def forward(self, ids: torch.Tensor) -> Output:
        """ids [B, T], each row a text from position 0 on."""
        config, weights = self.config, self.weights
        rows, shared = self.hashes.rows(ids), Shared()
        loads: dict[str, torch.Tensor] = {}
        streams, pre = begin(weights["embed.weight"][ids], config)
        states = []
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            if layer in self.states_of:
                states.append(streams.mean(-2))
            if layer in rows:
                streams = engram(streams, rows[layer], weights, f"{name}.engram", config)
            attend = partial(attention, layer=layer, weights=weights, config=config, shared=shared)
            streams, pre = sublayer(streams, pre, weights, name, "attn", config, attend)
            experts = partial(moe, weights=weights, name=f"{name}.ffn", config=config, loads=loads)
            streams, pre = sublayer(streams, pre, weights, name, "ffn", config, experts)
        hidden = rms_norm(collapse(streams, pre), weights["norm.weight"], config.norm_eps)
        index_loss = torch.stack(shared.index_losses).sum()
        return Output(hidden @ weights["head.weight"].T, torch.cat(states, dim=-1), index_loss, loads)
