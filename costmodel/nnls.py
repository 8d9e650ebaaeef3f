"""Least squares with coefficients that are not negative, for a handful of them."""

from itertools import combinations

import numpy as np


def nnls(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """The x >= 0 of least x.gram.x / 2 - moment.x, by trying which coefficients are zero: exact, for a few.

    gram: [d, d] float64, positive definite. moment: [d] float64. Returns [d] float64.
    """
    count = len(moment)
    x: np.ndarray = np.linalg.solve(gram, moment)
    if (x >= 0.0).all():
        return x
    best, least = np.zeros(count), 0.0
    for size in range(1, count):
        for kept in combinations(range(count), size):
            part = np.linalg.solve(gram[np.ix_(kept, kept)], moment[list(kept)])
            value = -0.5 * float(moment[list(kept)] @ part)  # at the part's own optimum
            if value < least and (part >= 0.0).all():
                best, least = np.zeros(count), value
                best[list(kept)] = part
    return best
