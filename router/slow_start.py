"""The growing share of an engine that is new or has recovered."""

from collections.abc import Sequence
from math import ceil

from deepinfer_router.target import Target


def share(target: Target, mean_active: float, now: float, seconds: float) -> int:
    """Requests it may have: ceil(mean of the others * age / `seconds`), at least one.

    Balancing by load alone would send everything to the empty engine. `now`: on the clock of `uncertain_until`.
    """
    age = max(0.0, now - (target.uncertain_until - seconds))
    return max(1, ceil(mean_active * min(1.0, age / seconds))) if seconds > 0 else max(1, ceil(mean_active))


def within_share(targets: Sequence[Target], now: float, seconds: float) -> list[Target]:
    """Those that may take more. All of them where none is old enough to say what a share is, or each has its share."""
    known = [target.active for target in targets if target.uncertain_until <= now]
    if not known or len(known) == len(targets):
        return list(targets)
    mean = sum(known) / len(known)
    within = [
        target
        for target in targets
        if target.uncertain_until <= now or target.active < share(target, mean, now, seconds)
    ]
    return within or list(targets)
