"""Load of ranks under a placement, and moe_lb: how much longer the slowest rank works than the mean one."""

from typing import Any

import numpy as np

Array = Any

DRAW = 17
"""Seed of what falls by chance."""


def replica_counts(placement: Array, experts: int) -> Array:
    """[L, P] slots of logical experts -> [L, E] int64: how many slots hold each."""
    layers, physical = placement.shape
    flat = placement.astype(np.int64) + experts * np.arange(layers)[:, None]
    return np.bincount(flat.ravel(), minlength=layers * experts).reshape(layers, experts)


def shares(placement: Array, experts: int, ranks: int) -> Array:
    """[L, E, ranks] float64: the part of each expert's tokens that each rank computes.

    vLLM picks a token's replica by a hash of the token's place in the batch, so replicas get equal parts on average.
    """
    layers, physical = placement.shape
    part = 1.0 / np.maximum(replica_counts(placement, experts), 1)
    rank = np.arange(physical) // (physical // ranks)
    made = np.zeros((layers, experts, ranks))
    layer = np.arange(layers)[:, None]
    np.add.at(made, (layer, placement, rank[None, :]), part[layer, placement])
    return made


def rank_loads(counts: Array, placement: Array, ranks: int) -> Array:
    """Tokens that each rank computes: counts [T, L, E], placement [L, P] -> [T, L, ranks] float64."""
    made = shares(placement, counts.shape[2], ranks)
    loads = np.empty((*counts.shape[:2], ranks))
    for layer in range(counts.shape[1]):
        loads[:, layer] = counts[:, layer].astype(np.float64) @ made[layer]
    return loads


def drawn_loads(counts: Array, placement: Array, ranks: int) -> Array:
    """[T, L, ranks]: as `rank_loads`, but an expert's tokens fall to its replicas by chance and not evenly.

    vLLM picks a replica by a hash of a token's place in the batch, which has nothing to do with what the token is.
    Always the same draw.
    """
    loads = rank_loads(counts, placement, ranks)
    random = np.random.default_rng(DRAW)
    replicas = replica_counts(placement, counts.shape[2])
    rank_of_slot = np.arange(placement.shape[1]) // (placement.shape[1] // ranks)
    for layer in range(counts.shape[1]):
        for expert in np.flatnonzero(replicas[layer] > 1):
            tokens, parts = counts[:, layer, expert], int(replicas[layer, expert])
            drawn = random.multinomial(tokens, np.full(parts, 1 / parts)) - tokens[:, None] / parts
            for part, slot in enumerate(np.flatnonzero(placement[layer] == expert)):
                loads[:, layer, rank_of_slot[slot]] += drawn[:, part]
    return loads


def moe_lb(loads: Array) -> float:
    """Sum over steps and layers of the slowest rank, over that of the mean: [T, L, ranks] -> >= 1; 1 without load."""
    mean = float(loads.mean(axis=-1).sum())
    return float(loads.max(axis=-1).sum()) / mean if mean > 0 else 1.0
