"""What a placement comes to on steps, and what no placement comes below."""

from __future__ import annotations

import numpy as np

SEED = 17


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
