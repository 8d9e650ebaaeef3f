"""Writes of one turn of the event loop go out together, at its end.

A write on this host runs through the kernel as far as the reader, whom it wakes. A reader that is awake already finds
what comes next by itself.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

_log = logging.getLogger(__name__)
_MOST_AT_ONCE = 256


class Turn:
    """Of one event loop, on its thread.

    Who waits for its end without company has waited for nothing, and for another turn of the loop: after that the next
    write goes out at once, the second time in a row the next two, then four, at most 256.
    """

    __slots__ = ("at_once", "waiting", "_loop", "_next")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.at_once = 0
        """Writes that need not wait, from now on."""
        self.waiting: list[Outgoing] = []
        """What writes at its end."""
        self._loop = loop
        self._next = 1

    def add(self, outgoing: "Outgoing") -> None:
        """Have it write at the turn's end."""
        if not self.waiting:
            self._loop.call_soon(self._end)
        self.waiting.append(outgoing)

    def _end(self) -> None:
        waiting, self.waiting = self.waiting, []
        if len(waiting) > 1:
            self._next = 1
        else:
            self.at_once = self._next
            self._next = min(2 * self._next, _MOST_AT_ONCE)
        for outgoing in waiting:
            try:
                outgoing.flush()
            except Exception:
                _log.exception("a write at the end of a turn")


class Outgoing(asyncio.Transport):
    """A transport whose `write` may wait for the end of the turn. All else comes behind it, as without this."""

    __slots__ = ("write_at_once", "_data", "_transport", "_turn")

    def __init__(self, transport: asyncio.Transport, turn: Turn) -> None:
        self.write_at_once = transport.write
        """For those who have not called `write` in this turn."""
        self._data = b""
        self._transport = transport
        self._turn = turn

    def write(self, data: Any) -> None:
        turn = self._turn
        if self._data:
            self._data += data
        elif turn.at_once and not turn.waiting:
            turn.at_once -= 1
            self.write_at_once(data)
        else:
            self._data = data
            turn.add(self)

    def flush(self) -> None:
        """Write what waits."""
        data, self._data = self._data, b""
        if data and not self._transport.is_closing():
            self.write_at_once(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.flush()
        self._transport.writelines(list_of_data)

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self.flush()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return len(self._data) + self._transport.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
