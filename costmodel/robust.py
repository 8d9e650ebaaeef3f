"""Least squares of relative errors that outliers do not bend.

Lists of floats: for some hundred observations of three coefficients that takes three times as long as numpy, and numpy
is 12 MB of each of the router's workers, which have no other use for it.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import floor, isfinite, log, log2
from operator import mul

from deepinfer_costmodel.nnls import nnls

_TRIMS, _STEPS = 3, 8
_TRIMMED = 0.6  # the part that is taken for good at first
_HEARD = 5  # observations of a size that may differ from all others
_SCALE = (0.02, 1.0)  # bounds of the spread of relative errors
_TUKEY = 4.685  # 95 % as efficient as least squares under normal noise

Column = Sequence[float]


def fitted(
    features: Sequence[Column],
    seconds: Column,
    weights: Column,
    anchors: Sequence[Column],
    prior: Sequence[float],
) -> list[float] | None:
    """Coefficients by iteratively reweighted least squares of relative errors, against the scaled prior at the anchors.

    features: [d][n], a column a coefficient; seconds, weights: [n], positive; anchors: [d][m]; prior: [d]. Returns [d],
    or None where numbers left what floats can hold.
    """
    # The prior's scale: the median of what was seen over what it predicts.
    by_prior = predicted(features, prior)
    scaled = weighted_quantile([s / p for s, p in zip(seconds, by_prior, strict=True)], weights, 0.5)
    sizes = [floor(0.5 * log2(p)) for p in by_prior]
    coefficients = [scaled * term for term in prior]
    at_anchors = predicted(anchors, coefficients)
    now = predicted(features, coefficients)
    for step in range(_STEPS):
        errors = [abs(log(s / p)) for s, p in zip(seconds, now, strict=True)]
        scale = min(max(1.4826 * weighted_quantile(errors, weights, 0.5), _SCALE[0]), _SCALE[1])
        distance = [error / scale for error in errors]
        # From far off the spread is no measure of outliers: at first the nearer part is fitted (least trimmed squares).
        robust = nearer(distance, weights, sizes) if step < _TRIMS else bisquare(distance)
        heard = [w * r / (scale * p) ** 2 for w, r, p in zip(weights, robust, now, strict=True)]
        larger = [max(*pair) for pair in zip(at_anchors, predicted(anchors, coefficients), strict=True)]
        pull = [1.0 / each**2 for each in larger]
        gram, moment = _normal(features, seconds, heard)
        more_gram, more_moment = _normal(anchors, at_anchors, pull)
        gram = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(gram, more_gram, strict=True)]
        moment = [a + b for a, b in zip(moment, more_moment, strict=True)]
        try:
            solved = _in_units(gram, moment)
        except (ZeroDivisionError, ValueError, OverflowError):
            return None
        if not all(map(isfinite, solved)):
            return None
        before, now = now, predicted(features, solved)
        coefficients = solved
        if step > _TRIMS and all(abs(a - b) <= 1e-3 * b for a, b in zip(now, before, strict=True)):
            break
    return coefficients


def predicted(features: Sequence[Column], coefficients: Sequence[float]) -> list[float]:
    """Seconds, more than none. features: [d][n]; coefficients: [d]. Returns [n]."""
    total = [coefficients[0] * x for x in features[0]]
    for column, factor in zip(features[1:], coefficients[1:], strict=True):
        total = [t + factor * x for t, x in zip(total, column, strict=True)]
    return [t if t > 1e-12 else 1e-12 for t in total]


def _normal(features: Sequence[Column], target: Column, weights: Column) -> tuple[list[list[float]], list[float]]:
    """Matrix [d][d] and right side [d] of the normal equations. features: [d][n]; target, weights: [n]."""
    weighted = [list(map(mul, weights, column)) for column in features]
    gram = [[0.0] * len(features) for _ in features]
    for i, left in enumerate(weighted):
        for j in range(i + 1):
            gram[i][j] = gram[j][i] = sum(map(mul, left, features[j]))
    return gram, [sum(map(mul, left, target)) for left in weighted]


def _in_units(gram: list[list[float]], moment: list[float]) -> list[float]:
    """The non-negative solution, computed with each coefficient in units that make the diagonal 1."""
    units = [gram[i][i] ** -0.5 for i in range(len(moment))]
    balanced = [[g * u * v for g, v in zip(row, units, strict=True)] for row, u in zip(gram, units, strict=True)]
    for i in range(len(units)):
        balanced[i][i] += 1e-12
    return [x * u for x, u in zip(nnls(balanced, list(map(mul, moment, units))), units, strict=True)]


def nearer(distance: Column, weights: Column, sizes: Sequence[int]) -> list[bool]:
    """Which observations are among the nearer ones of their size. All [n]; returns [n].

    Of each size for itself, or the few long prompts would be outliers to the many short ones. A size seen too seldom to
    tell is compared with all.
    """
    limit = weighted_quantile(distance, weights, _TRIMMED)
    of_size: defaultdict[int, list[int]] = defaultdict(list)
    for at, size in enumerate(sizes):
        of_size[size].append(at)
    limits = {
        size: weighted_quantile([distance[at] for at in places], [weights[at] for at in places], _TRIMMED)
        for size, places in of_size.items()
        if len(places) >= _HEARD
    }
    return [far <= limits.get(size, limit) for far, size in zip(distance, sizes, strict=True)]


def bisquare(distance: Column) -> list[float]:
    """Tukey's weights of errors so many scales away: 1 at none, 0 from 4.685 on."""
    return [(1.0 - (far / _TUKEY) ** 2) ** 2 if far < _TUKEY else 0.0 for far in distance]


def weighted_quantile(values: Column, weights: Column, part: float) -> float:
    """The value at which this part of the weight is reached."""
    order = sorted(range(len(values)), key=values.__getitem__)
    reached = list(accumulate(weights[at] for at in order))
    return values[order[bisect_left(reached, part * reached[-1])]]
