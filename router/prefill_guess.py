"""When the prefill of an answer without a stream is taken to be done: nobody says, so it is when it was predicted."""

import asyncio
from heapq import heappop, heappush
from itertools import count

from deepinfer_router.lease import Lease

TICK_S = 0.02


class PrefillGuess:
    """One timer for all leases, and none while there are none: a timer each took 5 us of 120 a request."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[float, int, Lease]] = []
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, lease: Lease, seconds: float) -> None:
        """Its prefill is done in `seconds`, or up to a tick later. Nothing happens to a lease that is over by then."""
        heappush(self._due, (self._loop.time() + seconds, next(self._numbers), lease))
        if self._timer is None:
            self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        due, now = self._due, self._loop.time()
        while due and (due[0][0] <= now or due[0][2].outcome):
            heappop(due)[2].first_token(now)
        self._timer = self._loop.call_later(TICK_S, self._tick) if due else None
