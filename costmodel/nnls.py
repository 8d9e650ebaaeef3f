"""Least squares with coefficients that are not negative, for a handful of them."""

from collections.abc import Sequence
from itertools import combinations

Matrix = Sequence[Sequence[float]]


def nnls(gram: Matrix, moment: Sequence[float]) -> list[float]:
    """The x >= 0 of least x.gram.x / 2 - moment.x, by trying which coefficients are zero: exact, for a few.

    gram: [d][d], positive definite. moment: [d]. Returns [d]. Raises ZeroDivisionError: it is not definite.
    """
    count = len(moment)
    x = solved(gram, moment)
    if min(x) >= 0.0:
        return x
    best, least = [0.0] * count, 0.0
    for size in range(1, count):
        for kept in combinations(range(count), size):
            right = [moment[i] for i in kept]
            part = solved([[gram[i][j] for j in kept] for i in kept], right)
            value = -0.5 * sum(m * p for m, p in zip(right, part, strict=True))  # at the part's own optimum
            if value < least and min(part) >= 0.0:
                best, least = [0.0] * count, value
                for i, p in zip(kept, part, strict=True):
                    best[i] = p
    return best


def solved(matrix: Matrix, vector: Sequence[float]) -> list[float]:
    """x of matrix.x = vector, by Gaussian elimination with the largest pivot of each column.

    matrix: [d][d]. vector: [d]. Returns [d]. Raises ZeroDivisionError: there is none, or not one alone.
    """
    rows = [[*row, right] for row, right in zip(matrix, vector, strict=True)]
    count = len(rows)
    for at in range(count):
        pivot = max(range(at, count), key=lambda i: abs(rows[i][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for below in range(at + 1, count):
            factor = rows[below][at] / rows[at][at]
            rows[below] = [b - factor * a for b, a in zip(rows[below], rows[at], strict=True)]
    x = [0.0] * count
    for at in reversed(range(count)):
        known = sum(rows[at][i] * x[i] for i in range(at + 1, count))
        x[at] = (rows[at][count] - known) / rows[at][at]
    return x
