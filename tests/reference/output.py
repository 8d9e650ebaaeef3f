"""What one forward pass of the reference gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Output:
    """T tokens, V vocabulary, L layers, D hidden size, M streams, k experts per token."""

    logits: torch.Tensor  # [T, V]
    hidden_states: torch.Tensor  # [L + 2, T, D]: embedding, collapsed after each layer, after the final norm
    pre_mix: torch.Tensor  # [L, T, M]: the mix that each layer's FFN hands on
    streams_last: torch.Tensor  # [L, M, D]: the streams after each layer, last token
    stream_means: torch.Tensor  # [L, T, D]: the mean of the streams as they come to each layer, before Engram
    router_ids: torch.Tensor  # [L, T, k]
    router_weights: torch.Tensor  # [L, T, k]
    index_topk: dict[int, list[set[int]]] = field(default_factory=dict)  # index source -> rows of each token
    candidate_blocks: list[set[int]] | None = None  # blocks of each token; None without a candidate source
    engram_hash_ids: torch.Tensor | None = None  # [Engram layers, T, columns]; None without Engram


def as_sets(chosen: torch.Tensor) -> list[set[int]]:
    """bool [T, N] -> the true columns of each row."""
    return [set(torch.nonzero(row).flatten().tolist()) for row in chosen]
