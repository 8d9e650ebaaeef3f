"""What verification asks of an implementation of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class Prefill:
    """Values of one prompt of T tokens. Only `logits` is required; what is None or empty is not compared."""

    logits: torch.Tensor  # float32 [T, V], on the CPU: row t predicts token t + 1
    hidden_states: torch.Tensor | None = None  # [L + 2, T, D]: embedding, collapsed after each layer, final norm
    router_ids: torch.Tensor | None = None  # int [L, T, k]
    engram_hash_ids: torch.Tensor | None = None  # int [Engram layers, T, columns]
    candidate_blocks: list[set[int]] | None = None  # blocks kept, for each token
    index_topk: dict[int, list[set[int]]] = field(default_factory=dict)  # index source -> rows chosen, for each token


@dataclass(frozen=True)
class Generation:
    """A greedy continuation of n tokens."""

    ids: list[int]
    logits: torch.Tensor | None = None  # float32 [n, V], row j chose token j; None where the backend cannot tell


class Backend(Protocol):
    """One implementation with one checkpoint loaded. Calls come one at a time and share nothing."""

    name: str

    def prefill(self, prompt_ids: Sequence[int]) -> Prefill:
        """Run a prompt from nothing and return the values at all of its positions."""
        ...

    def generate(self, prompt_ids: Sequence[int], count: int) -> Generation:
        """Continue a prompt greedily by exactly `count` tokens, end-of-sequence tokens included as any other."""
        ...

    def close(self) -> None:
        """Free what the backend holds. No call follows."""
        ...
