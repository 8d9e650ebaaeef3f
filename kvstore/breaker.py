"""Stops asking a disk that keeps failing, and asks again now and then."""

from collections.abc import Callable
from threading import Lock
from time import monotonic


class Breaker:
    """Open after `failures` failures with no success between; then one probe every `pause_seconds`. Thread-safe."""

    def __init__(self, failures: int, pause_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._limit = failures
        self._pause_seconds = pause_seconds
        self._clock = clock
        self._failures = 0
        self._probe_at = 0.0
        self._lock = Lock()

    def is_open(self) -> bool:
        """Whether it is failing and no probe is due."""
        with self._lock:
            return self._failures >= self._limit and self._clock() < self._probe_at

    def admit(self) -> bool:
        """Whether to try. When open, True once a pause: that try is the probe, and must end in one of the next two."""
        with self._lock:
            if self._failures < self._limit:
                return True
            now = self._clock()
            if now < self._probe_at:
                return False
            self._probe_at = now + self._pause_seconds
            return True

    def succeeded(self) -> None:
        """A try ended well: closed."""
        with self._lock:
            self._failures = 0

    def failed(self) -> bool:
        """A try failed; whether that opened it."""
        with self._lock:
            self._failures += 1
            self._probe_at = self._clock() + self._pause_seconds
            return self._failures == self._limit
