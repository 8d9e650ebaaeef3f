"""What a placement comes to on steps, and what no placement comes below."""

from __future__ import annotations

import numpy as np

from deepinfer_vllm.eplb.moe_lb import rank_loads, replica_counts

SEED = 17


def drawn_loads(counts: np.ndarray, placement: np.ndarray, ranks: int) -> np.ndarray:
    """[T, L, ranks]: as `moe_lb.rank_loads`, but an expert's tokens fall to its replicas by chance and not evenly.

    vLLM picks a replica by a hash of a token's place in the batch, which has nothing to do with what the token is.
    """
    loads = rank_loads(counts, placement, ranks)
    random = np.random.default_rng(SEED)
    replicas = replica_counts(placement, counts.shape[2])
    rank_of_slot = np.arange(placement.shape[1]) // (placement.shape[1] // ranks)
    for layer in range(counts.shape[1]):
        for expert in np.flatnonzero(replicas[layer] > 1):
            tokens, parts = counts[:, layer, expert], int(replicas[layer, expert])
            drawn = random.multinomial(tokens, np.full(parts, 1 / parts)) - tokens[:, None] / parts
            for part, slot in enumerate(np.flatnonzero(placement[layer] == expert)):
                loads[:, layer, rank_of_slot[slot]] += drawn[:, part]
    return loads


def noise_floor(counts: np.ndarray, ranks: int) -> float:
    """moe_lb where every rank's share of every step is the same and only which tokens come is chance.

    Not a bound in the strict sense: a placement made for the very steps it is measured on can come below it.
    """
    random = np.random.default_rng(SEED)
    totals = counts.sum(-1).ravel()
    drawn = random.multinomial(totals, np.full(ranks, 1 / ranks))
    return float(drawn.max(-1).sum() / (totals.sum() / ranks))


def hard_bound(counts: np.ndarray, ranks: int, physical: int) -> float:
    """No placement, comes below: the mean, or an expert's load over the most replicas it can get."""
    totals = counts.sum(-1) / ranks
    replicas = min(ranks, physical - counts.shape[2] + 1)
    return float(np.maximum(totals, counts.max(-1) / replicas).sum() / totals.sum())
