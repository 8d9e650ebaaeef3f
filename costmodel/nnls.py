"""Least squares with coefficients that are not negative, for a handful of them."""

from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def nnls(gram: Matrix, moment: Sequence[float]) -> list[float]:
    """The x >= 0 of least x.gram.x / 2 - moment.x, exact: the active set method of Lawson and Hanson.

    gram: [d][d], positive definite. moment: [d]. Returns [d]. Raises ZeroDivisionError: it is not definite.
    """
    x = solved(gram, moment)
    if min(x) >= 0.0:
        return x
    x, free, barred = [0.0] * len(moment), set[int](), set[int]()
    while True:
        slopes = [m - sum(g * v for g, v in zip(row, x, strict=True)) for row, m in zip(gram, moment, strict=True)]
        steepest = max((i for i in range(len(x)) if i not in free | barred), key=slopes.__getitem__, default=None)
        if steepest is None or slopes[steepest] <= 0.0:
            return x
        free.add(steepest)
        best = _optimum(gram, moment, free)
        if best[steepest] <= 0.0:  # rounding: nothing is gained there
            free.remove(steepest)
            barred.add(steepest)
            continue
        barred.clear()
        while min(best.values()) < 0.0:
            # From x towards the optimum as far as the first bound, which holds from there on.
            reach = {i: x[i] / (x[i] - value) for i, value in best.items() if value < 0.0}
            first = min(reach, key=reach.__getitem__)
            for i, value in best.items():
                x[i] += reach[first] * (value - x[i])
            x[first] = 0.0
            free.remove(first)
            best = _optimum(gram, moment, free)
        for i, value in best.items():
            x[i] = value


def _optimum(gram: Matrix, moment: Sequence[float], free: set[int]) -> dict[int, float]:
    """What the free coefficients are where the others are 0 and no bound holds."""
    order = sorted(free)
    part = solved([[gram[i][j] for j in order] for i in order], [moment[i] for i in order])
    return dict(zip(order, part, strict=True))


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
