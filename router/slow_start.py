"""The growing share of an engine that is new or has recovered."""

from collections.abc import Sequence
from math import ceil

from deepinfer_router.target import Target


class Shares:
    """What targets may have at one time: new ones ceil(mean of the old ones * age / `seconds`), at least one.

    Balancing by load alone would send everything to the empty engine. Where all are new there is no share.
    """

    def __init__(self, targets: Sequence[Target], now: float, seconds: float) -> None:
        """`now`: on the clock of `uncertain_until`. `seconds`: until a new one counts as old."""
        old = [target.active for target in targets if target.uncertain_until <= now]
        self._mean = sum(old) / len(old) if old else None
        self._now = now
        self._seconds = seconds

    def may_take(self, target: Target) -> bool:
        """Whether one more is within its share."""
        left = target.uncertain_until - self._now
        if left <= 0 or self._mean is None:
            return True
        grown = max(0.0, 1 - left / self._seconds) if self._seconds > 0 else 1.0
        return target.active < max(1, ceil(self._mean * grown))


def within_share(targets: Sequence[Target], now: float, seconds: float) -> Sequence[Target]:
    """Those that may take one more; all of them if none may, for shares steer and never refuse."""
    shares = Shares(targets, now, seconds)
    return [target for target in targets if shares.may_take(target)] or targets
