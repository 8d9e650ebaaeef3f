"""How experts' loads go together: second moments of the steps to come, from those that were."""

from typing import Any

import numpy as np

Array = Any

MAX_ROWS = 256
"""Steps beyond so many are added up with their neighbours: what lasts longer than that is what a placement can use."""
WANDER = 0.1
"""Standard deviation, as a part of its load, of how far an expert may go from the window's until the next time."""


def second_moments(counts: Array) -> Array:
    """[T, E] -> [E, E] float64, in units of tokens: the sum over steps of n n' / N, without what sampling adds to it.

    N is a step's total, so that a step counts by its size, as it does in moe_lb. Tokens that choose experts
    independently add noise on the diagonal whatever the placement is: a rank's share of them is as random as its mean
    is large. What is not the mean's is shrunk by Ledoit and Wolf's intensity (Journal of Multivariate Analysis 88,
    2004): a placement would else be fitted to the accidents of few steps.
    """
    steps = _rows(counts)
    experts = counts.shape[1]
    if not len(steps):
        return np.zeros((experts, experts))
    totals = steps.sum(1)
    total = float(totals.sum())
    mean = steps.sum(0) / np.float32(total)
    rest = (steps - totals[:, None] * mean) / np.sqrt(totals)[:, None]
    common = (rest.T @ rest).astype(np.float64)
    keep = 1 - _noise(rest, common)
    common *= keep
    mean = mean.astype(np.float64)
    sampling = (steps / totals[:, None]).sum(0, dtype=np.float64)
    common[np.diag_indices(experts)] += total * (WANDER * mean) ** 2 - keep * sampling
    return common + total * np.outer(mean, mean)


def _rows(counts: Array) -> Array:
    """[at most MAX_ROWS, E] float32: sums of equally many neighbouring steps, without empty ones."""
    merged = -(-len(counts) // MAX_ROWS)
    made = np.add.reduceat(counts, np.arange(0, len(counts), merged), axis=0).astype(np.float32)
    return made[made.sum(1) > 0]


def _noise(rest: Array, common: Array) -> float:
    """The part of the covariances, off the diagonal, that another sample would not show again: 0 to 1."""
    own = np.diag(common)
    off = float((common**2).sum() - (own**2).sum())
    squares = (rest**2).astype(np.float64)
    spread = float((squares.sum(1) ** 2).sum() - (squares**2).sum()) - off / len(rest)
    return min(1.0, max(0.0, spread / off)) if off > 0 else 1.0
