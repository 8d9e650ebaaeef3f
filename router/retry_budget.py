"""How many requests may be sent a second time, so that retries cannot multiply an overload."""

_SECONDS = 10


class RetryBudget:
    """Of the requests of the last 10 s a share may be retried, or `floor` of few. One thread; knows no clock."""

    def __init__(self, share: float = 0.1, floor: int = 3) -> None:
        """`share`: retries a request, 0 to 1. `floor`: retries in 10 s that are allowed however few requests came."""
        self._share = share
        self._floor = floor
        self._requests = [0] * _SECONDS
        self._retries = [0] * _SECONDS
        self._second = 0

    def request(self, now: float) -> None:
        """A request came. `now`: the clock, seconds."""
        if int(now) != self._second:
            self._turn(int(now))
        self._requests[self._second % _SECONDS] += 1

    def take(self, now: float) -> bool:
        """Whether one may be retried now; if so, it is counted."""
        if int(now) != self._second:
            self._turn(int(now))
        if sum(self._retries) + 1 > max(self._floor, self._share * sum(self._requests)):
            return False
        self._retries[self._second % _SECONDS] += 1
        return True

    def _turn(self, second: int) -> None:
        # Seconds between the last and this one had nothing; a clock that jumps back only empties one early.
        for empty in range(max(self._second + 1, second - _SECONDS + 1), second + 1) or (second,):
            self._requests[empty % _SECONDS] = self._retries[empty % _SECONDS] = 0
        self._second = second
