"""The largest of a row's scores: by block of the vocabulary, as kernels leave it, and among the blocks."""

import numpy as np
from numpy.typing import NDArray


def store_block_winners(
    scores: NDArray[np.floating], size: int, winners: NDArray[np.integer], maxima: NDArray[np.floating]
) -> None:
    """Write the token and the value that lead each block of `size` of scores [N, V] into winners and maxima [N, B]."""
    rows = np.arange(len(scores))
    for block, start in enumerate(range(0, scores.shape[1], size)):
        part = scores[:, start : start + size]
        best = part.argmax(-1)
        winners[:, block], maxima[:, block] = best + start, part[rows, best]


def best_of_blocks(winners: NDArray[np.integer], maxima: NDArray[np.floating]) -> NDArray[np.integer]:
    """The winner [N] of the block with the largest maximum, of [N, B] each; NaN never leads."""
    if winners.shape[1] == 1:
        return winners[:, 0]
    block = np.where(np.isnan(maxima), -np.inf, maxima).argmax(-1)
    return winners[np.arange(len(winners)), block]
