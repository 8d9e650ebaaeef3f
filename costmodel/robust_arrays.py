"""`robust.fitted` with numpy, several times as fast: for processes that have numpy loaded anyway."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from deepinfer_costmodel.nnls import nnls
from deepinfer_costmodel.robust import HEARD, SCALE, STEPS, TRIMMED, TRIMS, TUKEY

Floats: TypeAlias = Any


def fitted(
    features: Sequence[Sequence[float]],
    seconds: Sequence[float],
    weights: Sequence[float],
    anchors: Sequence[Sequence[float]],
    prior: Sequence[float],
) -> list[float] | None:
    """See `robust.fitted`: the same steps, and the same answer but for rounding."""
    with np.errstate(all="ignore"):  # what is not finite in the end has no answer
        return _fitted(features, seconds, weights, anchors, prior)


def _fitted(features: Any, seconds: Any, weights: Any, anchors: Any, prior: Any) -> list[float] | None:
    seen, fixed = np.asarray(features), np.asarray(anchors)
    took, weight = np.asarray(seconds), np.asarray(weights)
    by_prior = _predicted(seen, np.asarray(prior))
    coefficients = _quantile(took / by_prior, weight, 0.5) * np.asarray(prior)
    sizes = np.unique(np.floor(0.5 * np.log2(by_prior)), return_inverse=True)[1]
    at_anchors, now = _predicted(fixed, coefficients), _predicted(seen, coefficients)
    for step in range(STEPS):
        errors = np.abs(np.log(took / now))
        scale = min(max(1.4826 * _quantile(errors, weight, 0.5), SCALE[0]), SCALE[1])
        distance = errors / scale
        robust = (
            _nearer(distance, weight, sizes) if step < TRIMS else np.clip(1 - (distance / TUKEY) ** 2, 0, None) ** 2
        )
        heard = weight * robust / (scale * now) ** 2
        pull = 1.0 / np.maximum(at_anchors, _predicted(fixed, coefficients)) ** 2
        gram = (seen * heard) @ seen.T + (fixed * pull) @ fixed.T
        moment = (seen * heard) @ took + (fixed * pull) @ at_anchors
        units = np.diagonal(gram) ** -0.5
        balanced = gram * units * units[:, None]
        if not np.isfinite(balanced).all():
            return None
        np.fill_diagonal(balanced, balanced.diagonal() + 1e-12)
        try:
            coefficients = np.asarray(nnls(balanced.tolist(), (moment * units).tolist())) * units
        except (ZeroDivisionError, OverflowError):
            return None
        if not np.isfinite(coefficients).all():
            return None
        before, now = now, _predicted(seen, coefficients)
        if step > TRIMS and (np.abs(now - before) <= 1e-3 * before).all():
            break
    found: list[float] = coefficients.tolist()
    return found


def _predicted(features: Floats, coefficients: Floats) -> Floats:
    """Seconds, more than none. features: [d, n]; coefficients: [d]. Returns [n]."""
    return np.maximum(coefficients @ features, 1e-12)


def _quantile(values: Floats, weights: Floats, part: float) -> float:
    """The value at which this part of the weight is reached. Both [n]."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(reached, part * reached[-1])]])


def _nearer(distance: Floats, weights: Floats, sizes: Any) -> Floats:
    """See `robust.nearer`. sizes: [n], from 0 without a gap."""
    limits = np.full(sizes.max() + 1, _quantile(distance, weights, TRIMMED))
    for size in np.flatnonzero(np.bincount(sizes) >= HEARD):
        limits[size] = _quantile(distance[sizes == size], weights[sizes == size], TRIMMED)
    return (distance <= limits[sizes]).astype(np.float64)
