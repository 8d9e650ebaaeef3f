"""When to try again what has failed: at once after the first time, then after pauses that double."""

from collections.abc import Callable
from time import monotonic

FIRST_SECONDS = 0.1
MOST_SECONDS = 5.0


class Patience:
    """Thread-safe enough: a race costs one try too many."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._until = 0.0

    def over(self) -> bool:
        """Whether it is time to try."""
        return self._clock() >= self._until

    def failed(self) -> None:
        """It failed once more."""
        if self._failures:
            self._until = self._clock() + min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** (self._failures - 1))
        self._failures = min(self._failures + 1, 16)

    def succeeded(self) -> None:
        """It works again."""
        self._failures = 0
        self._until = 0.0
