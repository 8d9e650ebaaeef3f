"""Reads streams less often while they come in many small pieces, as network drivers do with interrupts."""

import asyncio
from typing import Protocol

FULL_BYTES = 64 << 10
"""A read of so much is worth its system calls, whatever pieces it has."""
_BURSTS = 2
"""Reads with several pieces that are still nothing unusual, in one tick: a network that was late has one or two."""


class Stream(Protocol):
    """What is read."""

    def rest(self) -> None:
        """Read no further until `read_on`."""

    def read_on(self) -> None:
        """As before."""


class Coalescing:
    """Lets streams rest whose reads find several pieces again and again: their sender is faster than they are read, and
    what comes meanwhile goes on by one read and one write instead of dozens.

    A stream rests for `rest_s` at most, and one that is paced, whose reads find one piece, never. One timer for all,
    none while nothing comes in bursts. For one event loop's thread.
    """

    __slots__ = ("_loop", "_rest_s", "_bursts", "_resting", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, rest_s: float) -> None:
        """`rest_s`: 0 for never."""
        self._loop = loop
        self._rest_s = rest_s
        self._bursts: dict[Stream, int] = {}
        self._resting: list[Stream] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def resting(self) -> int:
        """Streams that rest now."""
        return len(self._resting)

    def burst(self, stream: Stream) -> None:
        """One read of it has found several pieces."""
        if not self._rest_s:
            return
        bursts = self._bursts[stream] = self._bursts.get(stream, 0) + 1
        if bursts > _BURSTS:
            stream.rest()
            self._resting.append(stream)
        if self._timer is None:
            self._timer = self._loop.call_later(self._rest_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._bursts.clear()
        resting, self._resting = self._resting, []
        for stream in resting:
            stream.read_on()
