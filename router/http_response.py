"""An engine's answer, and the ways to take its body."""

import asyncio
from collections.abc import AsyncIterator
from typing import Literal, Protocol

from deepinfer_router.http_headers import Headers, find

HELD_BYTES = 256 << 10
"""Of an answer that nobody takes: then its connection is read no further."""

Kind = Literal["connect", "reset", "timeout", "protocol"]


class UpstreamError(Exception):
    """An engine did not answer, or not to the end."""

    def __init__(self, kind: Kind, sent: bool, message: str) -> None:
        """`sent`: the engine may have seen the request."""
        super().__init__(message)
        self.kind: Kind = kind
        self.sent = sent
        self.message = message


class Sink(Protocol):
    """Takes an answer's body while it comes."""

    def data(self, body: bytes, complete: bool) -> None:
        """A piece, empty only together with `complete`: the last."""

    def lost(self, error: UpstreamError) -> None:
        """There will be no more."""


class Source(Protocol):
    """The connection that an answer comes over."""

    name: str
    """Of the engine, for errors."""

    def patience(self, first_data_s: float | None, stall_s: float | None) -> None:
        """How long the first piece of the body, and each later one, may take."""

    def deliver(self, response: "UpstreamResponse") -> None:
        """Give the response's sink what there is."""

    def hold(self, held: bool) -> None:
        """Read no further, or go on. What is not read for the client's sake is no stall of the engine."""

    def lose(self, error: UpstreamError, *, quietly: bool = False) -> None:
        """End the connection, and with it the answer that is under way. `quietly`: its sink knows."""


class UpstreamResponse:
    """An engine's answer: its head, and its body to be taken once, by `read`, by iteration, or by `relay`."""

    __slots__ = ("status", "headers", "complete", "error", "rest", "sink", "connection")

    def __init__(self, connection: "Source", status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        """Lower-case names."""
        self.complete = False
        """All of it has arrived."""
        self.error: UpstreamError | None = None
        """Why it never will."""
        self.rest = b""
        """Of a complete or lost body what nobody has taken yet."""
        self.sink: Sink | None = None
        self.connection = connection

    def header(self, name: bytes) -> bytes | None:
        """First value of the lower-case `name`."""
        return find(self.headers, name)

    def attach(self, sink: Sink) -> None:
        """Hand `sink` what is there, and the rest as it comes."""
        self.sink = sink
        self.connection.deliver(self)

    def cancel(self) -> None:
        """Take no more of it. The engine sees its client leave. Nothing happens where it is complete."""
        if not self.complete and self.error is None:
            self.connection.lose(UpstreamError("reset", True, "cancelled by the router"), quietly=True)

    async def read(self, limit: int, *, stall_s: float | None = None) -> bytes:
        """The whole body, at most `limit` bytes. Raises UpstreamError: also if a piece takes longer than `stall_s`."""
        if self.complete and len(self.rest) <= limit:  # an asynchronous iterator would cost more than all of that
            rest, self.rest = self.rest, b""
            return rest
        pieces: list[bytes] = []
        size = 0
        async for piece in self.pieces(first_data_s=stall_s, stall_s=stall_s):
            size += len(piece)
            if size > limit:
                self.cancel()
                raise UpstreamError("protocol", True, f"{self.connection.name}: an answer of more than {limit} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.pieces()

    async def pieces(self, *, first_data_s: float | None = None, stall_s: float | None = None) -> AsyncIterator[bytes]:
        """Pieces of the body as they come. Raises UpstreamError: also `timeout`, where the first takes longer than
        `first_data_s` or a later one longer than `stall_s`. Leaving the iteration early cancels the answer."""
        if self.complete:
            rest, self.rest = self.rest, b""
            if rest:
                yield rest
            return
        queue = _Queue(self)
        self.connection.patience(first_data_s, stall_s)
        self.attach(queue)
        try:
            while True:
                if queue.pieces:
                    yield queue.take()
                elif self.error is not None:
                    raise self.error
                elif queue.complete:
                    return
                else:
                    await queue.more()
        finally:
            self.cancel()
            self.sink = None  # which refers to this


class _Queue:
    """Pieces until somebody asks for them; the connection is read no further while there are many."""

    def __init__(self, response: UpstreamResponse) -> None:
        self.pieces: list[bytes] = []
        self.complete = False
        self._connection = response.connection
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None

    def data(self, body: bytes, complete: bool) -> None:
        if body:
            self.pieces.append(body)
            self._size += len(body)
        self.complete = complete
        if self._size > HELD_BYTES and not complete:
            self._connection.hold(True)
        self._wake()

    def lost(self, error: UpstreamError) -> None:
        self._wake()

    def take(self) -> bytes:
        data = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces.clear()
        self._size = 0
        if not self.complete:
            self._connection.hold(False)
        return data

    async def more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
