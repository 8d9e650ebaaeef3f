"""How late the event loop is: the time that everything on it waits."""

import asyncio
from collections.abc import Callable


class LoopLag:
    """Wakes ten times a second and tells `observe` by how many seconds it was woken late."""

    def __init__(self, observe: Callable[[float], None], interval_s: float = 0.1) -> None:
        self._observe = observe
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + interval_s
        self._timer = self._loop.call_at(self._due, self._woken)

    def stop(self) -> None:
        """Wake no more."""
        self._timer.cancel()

    def _woken(self) -> None:
        now = self._loop.time()
        self._observe(max(0.0, now - self._due))
        self._due = now + self._interval_s
        self._timer = self._loop.call_at(self._due, self._woken)
