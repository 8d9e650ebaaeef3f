"""Least squares of relative errors that outliers do not bend."""

import numpy as np

from deepinfer_costmodel.nnls import nnls

_TRIMS, _STEPS = 3, 8
_TRIMMED = 0.6  # the part that is taken for good at first
_HEARD = 5  # observations of a size that may differ from all others
_SCALE = (0.02, 1.0)  # bounds of the spread of relative errors
_TUKEY = 4.685  # 95 % as efficient as least squares under normal noise


def fitted(
    features: np.ndarray, seconds: np.ndarray, weights: np.ndarray, anchors: np.ndarray, prior: np.ndarray
) -> np.ndarray | None:
    """Coefficients by iteratively reweighted least squares of relative errors, against the scaled prior at the anchors.

    features: [n, d]; seconds, weights: [n], positive; anchors: [m, d]; prior: [d]. All float64. Returns [d], or None
    where numbers left what floats can hold.
    """
    # The prior's scale: the median of what was seen over what it predicts.
    by_prior = np.maximum(features @ prior, 1e-12)
    ratios, sizes = seconds / by_prior, np.floor(0.5 * np.log2(by_prior))
    coefficients: np.ndarray = prior * weighted_quantile(ratios, weights, 0.5)
    at_anchors = np.maximum(anchors @ coefficients, 1e-12)
    for step in range(_STEPS):
        predicted = np.maximum(features @ coefficients, 1e-12)
        errors = np.log(seconds / predicted)
        scale = float(np.clip(1.4826 * weighted_quantile(np.abs(errors), weights, 0.5), *_SCALE))
        distance = np.abs(errors) / scale
        # From far off the spread is no measure of outliers: at first the nearer part is fitted (least trimmed squares).
        robust = nearer(distance, weights, sizes) if step < _TRIMS else bisquare(distance)
        relative = features / predicted[:, None]
        larger = np.maximum(at_anchors, anchors @ coefficients)
        anchored = anchors / larger[:, None]
        weighted = relative * (weights * robust / scale**2)[:, None]
        gram = weighted.T @ relative + anchored.T @ anchored
        moment = weighted.T @ (seconds / predicted) + anchored.T @ (at_anchors / larger)
        units = 1.0 / np.sqrt(np.diagonal(gram))
        try:
            solved = nnls(gram * np.outer(units, units) + 1e-12 * np.eye(len(units)), moment * units) * units
        except np.linalg.LinAlgError:
            return None
        if not np.isfinite(solved).all():
            return None
        settled = np.allclose(features @ solved, features @ coefficients, rtol=1e-3)
        coefficients = solved
        if settled and step > _TRIMS:
            break
    return coefficients


def nearer(distance: np.ndarray, weights: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Which observations are among the nearer ones of their size. All arrays [n]; returns [n] of bool.

    Of each size for itself, or the few long prompts would be outliers to the many short ones. A size seen too seldom to
    tell is compared with all.
    """
    result: np.ndarray = distance <= weighted_quantile(distance, weights, _TRIMMED)
    for size in np.unique(sizes):
        of_size = sizes == size
        if of_size.sum() >= _HEARD:
            result[of_size] = distance[of_size] <= weighted_quantile(distance[of_size], weights[of_size], _TRIMMED)
    return result


def bisquare(distance: np.ndarray) -> np.ndarray:
    """Tukey's weights of errors so many scales away: 1 at none, 0 from 4.685 on."""
    weights: np.ndarray = np.square(np.maximum(0.0, 1.0 - np.square(distance / _TUKEY)))
    return weights


def weighted_quantile(values: np.ndarray, weights: np.ndarray, part: float) -> float:
    """The value at which this part of the weight is reached."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, part * reached[-1])])
