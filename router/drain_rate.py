"""How fast a queue drains."""

from math import exp


class DrainRate:
    """Seconds of predicted work that leave a queue in a second, over about the last `memory_s` in which it had any."""

    def __init__(self, memory_s: float = 10.0) -> None:
        self._memory_s = memory_s
        self._work = 0.0
        self._time = 0.0
        self._at: float | None = None

    def idle(self) -> None:
        """The queue is empty: the time from now on says nothing."""
        self._at = None

    def pass_to(self, now: float) -> None:
        """The queue has had something since the last call."""
        if self._at is not None and now > self._at:
            kept = exp((self._at - now) / self._memory_s)
            self._work *= kept
            self._time = self._time * kept + (now - self._at)
        self._at = now

    def took(self, cost_s: float, now: float) -> None:
        """So much left the queue."""
        self.pass_to(now)
        self._work += cost_s

    def seconds_for(self, cost_s: float) -> float | None:
        """How long so much takes; None if nothing has shown it."""
        return cost_s * self._time / self._work if self._work > 0 and self._time > 0 else None
