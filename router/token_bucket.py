"""A limit per time: so much at once, refilled evenly."""

from collections.abc import Callable
from time import monotonic


class TokenBucket:
    """Holds at most `amount`, and gets `amount` every `seconds`. May be spent below zero. Not thread-safe."""

    __slots__ = ("_amount", "_at", "_clock", "_level", "_per_second")

    def __init__(self, amount: float, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._amount = amount
        self._per_second = amount / seconds
        self._clock = clock
        self._level = amount
        self._at = clock()

    def wait_s(self, wanted: float) -> float:
        """Seconds until `wanted` can be had, 0.0 now. Of 0, until anything; of more than it holds, until it is full."""
        self._refill()
        missing = min(wanted, self._amount) - self._level
        if missing < 0 or (missing == 0 and wanted > 0):
            return 0.0
        return max(missing, 1e-9) / self._per_second

    def spend(self, amount: float) -> None:
        """Take it, even if it is not there; less than nothing is given back."""
        self._refill()
        self._level = min(self._amount, self._level - amount)

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self._amount, self._level + (now - self._at) * self._per_second)
        self._at = now
