"""How far predicted probabilities are from what happened: the expected calibration error."""

import numpy as np
from numpy.typing import NDArray

BINS = 15


def bin_of(predicted: NDArray[np.floating], bins: int = BINS) -> NDArray[np.int64]:
    """The bin of each probability: of `bins` of equal width over 0..1, closed below, the last on both sides."""
    return np.minimum((np.asarray(predicted, np.float64) * bins).astype(np.int64), bins - 1)


def error_of_sums(
    counts: NDArray[np.integer], predicted: NDArray[np.floating], happened: NDArray[np.floating]
) -> float:
    """The error of what was added up by bin, each [bins]: how many there were, their probabilities, what happened.

    Sum over bins of their share of all, times |mean predicted - share that happened|; an empty bin adds nothing, and
    without any outcome the error is 0.
    """
    total = int(counts.sum())
    return float(np.abs(predicted - happened).sum() / total) if total else 0.0


def expected_calibration_error(predicted: NDArray[np.floating], happened: NDArray[np.bool_], bins: int = BINS) -> float:
    """ECE of probabilities [N] and what happened [N], in 0..1 (Guo et al., 2017, arXiv:1706.04599, equation 3).

    Bins are of equal width and fixed, so that the error of a running engine, kept bin by bin, means the same as this
    one. It is biased upwards by noise: N calibrated outcomes read about 0.3 * sqrt(bins in use / N).
    """
    at = bin_of(predicted, bins)
    return error_of_sums(
        np.bincount(at, minlength=bins),
        np.bincount(at, weights=predicted, minlength=bins),
        np.bincount(at, weights=happened, minlength=bins),
    )
