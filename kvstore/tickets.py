"""Tickets: what a CHECK found, held against collection for a while. A ticket starts no I/O."""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from time import monotonic
from typing import NamedTuple

from deepinfer_kvstore.keys import KEY_BYTES, Key
from deepinfer_kvstore.protocol import TICKET_BYTES, split

MAX_TICKETS = 1 << 16


class Ticket(NamedTuple):
    """What one ticket stands for."""

    namespace: str
    packed_keys: bytes
    """The blocks, keys in a row."""
    deadline: float
    """In seconds of `monotonic`."""

    def keys(self) -> list[Key]:
        """The blocks."""
        return split(self.packed_keys, KEY_BYTES)


class Tickets:
    """The tickets of one server, of which a client sees random numbers only. Thread-safe.

    At most `max_bytes` of keys and `MAX_TICKETS`; the oldest tickets go first.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._bytes = 0
        self._tickets: OrderedDict[bytes, Ticket] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._tickets)

    def issue(self, namespace: str, keys: Sequence[Key], seconds: float) -> bytes:
        """A ticket for `keys`, good for `seconds`."""
        number, packed = secrets.token_bytes(TICKET_BYTES), b"".join(keys)
        with self._lock:
            self._expire()
            self._tickets[number] = Ticket(namespace, packed, self._clock() + seconds)
            self._bytes += len(packed)
            while self._bytes > self._max_bytes or len(self._tickets) > MAX_TICKETS:
                self._remove(next(iter(self._tickets)))
        return number

    def get(self, number: bytes) -> Ticket | None:
        """None: unknown, or over."""
        with self._lock:
            found = self._tickets.get(number)
            return found if found and found.deadline > self._clock() else None

    def release(self, number: bytes) -> None:
        """It is needed no more. No error for an unknown one."""
        with self._lock:
            self._remove(number)

    def _expire(self) -> None:
        """Those at the front. One that outlives others given after it keeps them in memory, no longer."""
        now = self._clock()
        while self._tickets and next(iter(self._tickets.values())).deadline <= now:
            self._remove(next(iter(self._tickets)))

    def _remove(self, number: bytes) -> None:
        ticket = self._tickets.pop(number, None)
        self._bytes -= len(ticket.packed_keys) if ticket else 0
