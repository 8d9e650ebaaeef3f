"""Virtual time: what happens next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[], None]


class EventQueue:
    """Actions in order of their time; of one time, in the order they were put in."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds, virtual."""
        self._heap: list[tuple[float, int, Action]] = []
        self._order = count()

    def at(self, when: float, action: Action) -> None:
        """Do `action` at `when`. Raises ValueError for a time that has passed."""
        if when < self.now:
            raise ValueError(f"event at {when} s, after {self.now} s have passed")
        heappush(self._heap, (when, next(self._order), action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now, _, action = heappop(self._heap)
            action()
