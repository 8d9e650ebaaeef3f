"""When an engine that fails is left alone, and when it is tried again."""

from deepinfer_router.fleet_config import FleetConfig

_A_SUCCESS_LEAVES = 0.75


class Breaker:
    """The circuit of one engine, closed or open. Knows no clock; one thread.

    A fault adds 1 to a level, a success takes a quarter of it away, and it opens at `faults_to_open`: an engine that
    fails everything opens after so many requests, one that fails more than about two in five opens soon, and one
    that fails some requests for what is in them stays closed, however many it serves.
    """

    def __init__(self, config: FleetConfig) -> None:
        self._limit = float(config.faults_to_open)
        self._memory_s = config.fault_memory_s
        self._first_s = config.backoff_first_s
        self._most_s = config.backoff_most_s
        self._backoff_s = self._first_s
        self._last_fault = float("-inf")
        self.level = 0.0
        self.retry_at = 0.0
        """While it is open: when to try again."""

    def succeeded(self) -> None:
        """An answer came."""
        self.level *= _A_SUCCESS_LEAVES

    def failed(self, now: float) -> bool:
        """A fault; whether it is now one too many."""
        if now - self._last_fault > self._memory_s:
            self.level = 0.0
        self._last_fault = now
        self.level = min(self.level + 1, self._limit)
        return self.level >= self._limit

    def suspicious(self, now: float) -> bool:
        """Whether a fault is remembered."""
        return self.level >= _A_SUCCESS_LEAVES and now - self._last_fault <= self._memory_s

    def open(self, now: float) -> None:
        """Left alone from now for the back-off, which doubles each time until `close`."""
        self.retry_at = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, self._most_s)

    def close(self) -> None:
        """It works: everything is forgotten."""
        self.level = 0.0
        self._backoff_s = self._first_s
