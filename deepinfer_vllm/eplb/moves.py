"""What a rebalancing had to move."""

from typing import Any

import numpy as np

Array = Any


def moved_experts(before: Array, after: Array, ranks: int, experts: int) -> int:
    """Experts that a rank holds under placement `after` and did not under `before`, both [L, P], over all layers.

    Each of them crossed once, however many slots of its rank it has. Negative slots hold none.
    """
    gained = _held(after, ranks, experts) & ~_held(before, ranks, experts)
    return int(gained.sum())


def _held(placement: Array, ranks: int, experts: int) -> Array:
    """[L, ranks, E] bool: which experts a rank holds."""
    layers, slots = placement.shape
    held = np.zeros((layers, ranks, experts + 1), bool)
    rank = np.arange(slots) // (slots // ranks)
    held[np.arange(layers)[:, None], rank[None, :], placement] = True  # -1 goes to the last column
    return held[..., :experts]
