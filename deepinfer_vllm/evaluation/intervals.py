"""Confidence intervals for the mean of values in [0, 1], one an item."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from statistics import NormalDist


@dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its interval."""

    mean: float
    low: float
    high: float


def wilson(mean: float, trials: float, confidence: float = 0.95) -> Estimate:
    """Wilson's score interval for a proportion `mean` of `trials`, which may be a fraction.

    (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n), Wilson 1927; it stays in [0, 1] and has a width at 0 and 1.
    Raises ValueError unless trials > 0 and 0 <= mean <= 1.
    """
    if trials <= 0 or not 0 <= mean <= 1:
        raise ValueError(f"no interval for a mean of {mean} of {trials} trials")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    spread = z * sqrt(mean * (1 - mean) / trials + z * z / (4 * trials * trials))
    centre, scale = mean + z * z / (2 * trials), 1 + z * z / trials
    low = 0.0 if mean == 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if mean == 1 else min(1.0, (centre + spread) / scale)
    return Estimate(mean, low, high)


def clustered(values: Sequence[float], samples: int, confidence: float = 0.95) -> Estimate:
    """Wilson's interval for the mean of `values`, each the mean of `samples` draws of one item.

    Items are the clusters: draws of one item resemble each other, so the effective number of trials is
    p(1 - p) / SE², SE² = Σ (x - p)² / (m (m - 1)) over the m items (Dean and Pagano 2015, J. Surv. Stat. Meth. 3:4),
    here never less than m, nor more than m * samples. With one draw an item it is m, and this is Wilson's interval.
    The interval is about other items of the same kind. Raises ValueError without a value or outside [0, 1].
    """
    items = len(values)
    if not values or min(values) < 0 or max(values) > 1:
        raise ValueError("values in [0, 1] are needed, one an item")
    mean = min(1.0, max(0.0, fsum(values) / items))
    trials = float(items)
    if samples > 1 and 0 < mean < 1 and items > 1:
        variance = fsum((value - mean) ** 2 for value in values) / (items * (items - 1))
        most = float(items * samples)
        trials = most if variance == 0 else min(most, max(float(items), mean * (1 - mean) / variance))
    return wilson(mean, trials, confidence)
