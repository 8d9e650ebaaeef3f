"""Where events end in a stream of server-sent events, whatever TCP makes of it."""

import re

_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?=[^\n]))(?:\r\n|\n|\r(?=[^\n]))")
"""The end of a line and an empty line; each ends with LF, CRLF or CR. A CR that ends the data may be half of a CRLF."""
MAX_EVENT_BYTES = 16 << 20


class EventTooLong(ValueError):
    """An event does not end."""


class EventSplitter:
    """Cuts a stream into events. What it gives, one after another, is what it was given."""

    __slots__ = ("_partial", "_limit_bytes")

    def __init__(self, limit_bytes: int = MAX_EVENT_BYTES) -> None:
        self._partial = bytearray()
        self._limit_bytes = limit_bytes

    @property
    def partial(self) -> bytes:
        """Bytes of an event that has not ended."""
        return bytes(self._partial)

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, comments among them, each with the blank line that ends it.

        Raises:
            EventTooLong: one has more than `limit_bytes`.
        """
        partial = self._partial
        if not partial and data.endswith(b"\n\n") and b"\r" not in data:
            return [event + b"\n\n" for event in data[:-2].split(b"\n\n")]
        searched = max(0, len(partial) - 3)
        partial += data
        events = []
        start = 0
        for end in _BLANK_LINE.finditer(partial, searched):
            events.append(bytes(partial[start : end.end()]))
            start = end.end()
        del partial[:start]
        if len(partial) > self._limit_bytes:
            raise EventTooLong(f"an event of more than {self._limit_bytes} bytes; its blank line is missing")
        return events
