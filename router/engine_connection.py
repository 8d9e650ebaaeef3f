"""One HTTP/1.1 connection to an engine, as an asyncio protocol."""

import asyncio
from asyncio import Transport
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from deepinfer_router.coalescing import FULL_BYTES, Coalescing
from deepinfer_router.deadlines import NEVER, Deadlines
from deepinfer_router.http_headers import Headers, find
from deepinfer_router.http_response import HELD_BYTES, UpstreamError, UpstreamResponse
from deepinfer_router.outgoing import Outgoing, Turn

_JOINED_BYTES = 16 << 10
"""A body below this is copied behind its head; a longer one is written beside it, by one system call as well."""
_FRAMING_BYTES = 256 << 10
"""Of headers, trailers and interim answers that are read for one request."""
_RACE_S = 1.0
"""A connection of the pool that the engine closes within this time of a request was being closed already."""


class Pool(Protocol):
    """Whose connection it is."""

    url: str
    loop: asyncio.AbstractEventLoop
    deadlines: Deadlines
    coalescing: Coalescing
    turn: Turn

    def opened(self, connection: "EngineConnection") -> None:
        """It is there."""

    def ended(self, connection: "EngineConnection") -> None:
        """It is no more."""

    def unused(self, connection: "EngineConnection") -> None:
        """It must not be taken from the pool."""

    def give_back(self, connection: "EngineConnection") -> None:
        """It is idle."""


class EngineConnection(asyncio.Protocol):
    """One connection to an engine, in use or in its pool."""

    __slots__ = (
        "deadline",
        "heard_at",
        "name",
        "on_body",
        "_pool",
        "_transport",
        "_parser",
        "_headers",
        "_pieces",
        "_waiter",
        "_response",
        "_reusable",
        "_head_only",
        "_silent",
        "_sent_at",
        "_stall_s",
        "_first",
        "_held",
        "_closed",
        "_framing_bytes",
    )

    def __init__(self, pool: "Pool") -> None:
        self.deadline = NEVER
        self.heard_at = 0.0
        self.name = pool.url
        self._pool = pool
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self._parser = HttpResponseParser(self)
        self._waiter: asyncio.Future[UpstreamResponse] | None = None
        self._response: UpstreamResponse | None = None
        self._reusable = True
        self._head_only = False
        self._silent = True  # nothing has come since the request was sent
        self._sent_at = 0.0
        self._stall_s: float | None = None
        self._first = False  # no piece of the body has been handed on yet
        self._held = False
        self._closed = False
        self._framing_bytes = 0  # reads in which nothing of a body came

    # the pool's

    def send(
        self, head: bytes, body: bytes, head_only: bool, first_byte_s: float | None
    ) -> "asyncio.Future[UpstreamResponse]":
        """Send a request; its answer's head. The future raises UpstreamError."""
        pool = self._pool
        self._waiter = waiter = pool.loop.create_future()
        if self._closed:
            self._silent, self._sent_at = True, pool.loop.time()
            waiter.set_exception(
                UpstreamError("reset", False, f"{self.name}: the connection closed before it was used")
            )
            return waiter
        self._sent_at = now = pool.loop.time()
        self._head_only = head_only
        self._silent = True
        self._framing_bytes = 0
        self.deadline = NEVER if first_byte_s is None else now + first_byte_s
        if len(body) < _JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return waiter

    @property
    def raced(self) -> bool:
        """Whether the engine closed the connection without a byte, so soon that it cannot have begun to answer."""
        return self._silent and self._pool.loop.time() - self._sent_at < _RACE_S

    # the response's

    def patience(self, first_data_s: float | None, stall_s: float | None) -> None:
        """How long the first piece of the body, and each later one, may take."""
        self._stall_s = stall_s
        self._first = True
        self.deadline = NEVER if first_data_s is None else self._pool.loop.time() + first_data_s

    def deliver(self, response: UpstreamResponse) -> None:
        """Give the response's sink what there is."""
        sink = response.sink
        if sink is None:
            return
        if response is not self._response:  # it ended before it had a sink
            rest, response.rest = response.rest, b""
            if response.complete or rest:
                sink.data(rest, response.complete)
            if response.error is not None:
                sink.lost(response.error)
            return
        self.hold(False)
        pieces = self._pieces
        if pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self._begun()
            sink.data(body, False)

    def hold(self, held: bool) -> None:
        """Read no further, or go on. What is not read for the client's sake is no stall of the engine."""
        if held == self._held or self._closed:
            return
        self._held = held
        if held:
            self._transport.pause_reading()
            self.deadline = NEVER
        else:
            self._transport.resume_reading()
            self.heard_at = self._pool.loop.time()
            self._begun()

    def lose(self, error: UpstreamError, *, quietly: bool = False) -> None:
        """End the connection, and with it the answer that is under way. `quietly`: its sink knows."""
        self._closed = True
        self.deadline = NEVER
        self._transport.abort()
        self._fail(error, quietly)

    def close(self) -> None:
        """Of an idle connection."""
        self._closed = True
        self._transport.close()

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's derive from none of asyncio's
        self._transport = Outgoing(cast(Transport, transport), self._pool.turn)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        pool = self._pool
        self.heard_at = pool.deadlines.now
        self._silent = False
        broken = None
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            broken = error
        response = self._response
        if response is not None:
            waiter = self._waiter
            if waiter is not None:
                self._waiter = None
                self.deadline = NEVER
                if not waiter.done():
                    waiter.set_result(response)
            pieces = self._pieces
            if response.complete:
                body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                pieces.clear()
                self._ended(response, body, broken is None)
                return
            sink = response.sink
            if sink is None:
                if not self._held and sum(map(len, pieces)) > HELD_BYTES:
                    self.hold(True)
            elif not pieces:
                self._framing_bytes += len(data)
            else:
                if len(pieces) == 1:
                    body = pieces[0]
                else:
                    body = b"".join(pieces)
                    if len(body) < FULL_BYTES and not self._held:
                        pool.coalescing.burst(self)
                pieces.clear()
                if self._first:
                    self._begun()
                sink.data(body, False)
        else:
            self._framing_bytes += len(data)
        if self._closed:
            return
        if broken is not None:
            self.lose(UpstreamError("protocol", True, f"{self.name} sent what is not HTTP/1.1: {broken}"))
        elif self._framing_bytes > _FRAMING_BYTES:
            why = f"more than {_FRAMING_BYTES} bytes of headers"
            self.lose(UpstreamError("protocol", True, f"{self.name} sent {why}"))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._pool.ended(self)
        self._parser = None  # which refers to this
        self._headers = []  # of a head without end they are 10 MB, and errors keep this until the collector comes
        response = self._response
        if response is not None and exc is None and not response.error and _until_close(response):
            response.complete = True
            self._ended(response, b"".join(self._pieces), False)
            return
        why = f": {exc}" if exc else ""
        self._fail(UpstreamError("reset", True, f"{self.name} closed the connection before the answer's end{why}"))

    # the coalescing's

    def rest(self) -> None:
        """Read no further until `read_on`, which comes so soon that it is no stall."""
        self._transport.pause_reading()

    def read_on(self) -> None:
        """As before, unless it is held for the client's sake, or has ended."""
        if not self._held and not self._transport.is_closing():
            self._transport.resume_reading()

    # the deadlines'

    def expired(self, now: float) -> None:
        """Of an idle connection, a head, or the next piece of a body."""
        if self._waiter is not None:
            self.lose(UpstreamError("timeout", True, f"{self.name} sent no answer within {now - self._sent_at:.1f} s"))
        elif self._response is None:
            self._pool.unused(self)
            self.close()
        else:
            stall_s = self._stall_s
            if stall_s is not None and self.heard_at + stall_s > now:
                self.deadline = self.heard_at + stall_s
            else:
                self.lose(UpstreamError("timeout", True, f"{self.name} stopped sending an answer that is under way"))

    # llhttp's

    def on_message_begin(self) -> None:
        if self._response is not None or self._waiter is None:
            raise HttpParserError("data that no request asked for")
        self._headers = []  # trailers of the message before

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        if status < 200:
            return  # 100 Continue, 103 Early Hints: the answer is still to come
        self._response = response = UpstreamResponse(self, status, headers)
        self._reusable = self._parser.should_keep_alive()
        if self._head_only:
            self._reusable = False
            response.complete = True

    def on_message_complete(self) -> None:
        if self._response is not None:
            self._response.complete = True

    def _begun(self) -> None:
        """From now on it is a stall that ends the answer."""
        self._first = False
        self.deadline = NEVER if self._stall_s is None else self.heard_at + self._stall_s

    def _ended(self, response: UpstreamResponse, body: bytes, clean: bool) -> None:
        """All of the answer has come: back to the pool, or close. `body` is its last piece."""
        self._response = None
        self._stall_s = None
        if self._held:
            self._held = False
            if not self._closed:
                self._transport.resume_reading()
        if self._closed:
            pass
        elif self._transport.get_write_buffer_size():  # it answered before it had the request, which it may never read
            self._closed = True
            self.deadline = NEVER
            self._transport.abort()
        elif clean and self._reusable:
            self._pool.give_back(self)
        else:
            self.close()
        if response.sink is None:
            response.rest = body
        else:
            response.sink.data(body, True)

    def _fail(self, error: UpstreamError, quietly: bool = False) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        response, self._response = self._response, None
        if response is not None and not response.complete and response.error is None:
            response.error = error
            response.rest = b"".join(self._pieces)
            self._pieces.clear()
            if response.sink is not None and not quietly:
                response.sink.lost(error)


def _until_close(response: UpstreamResponse) -> bool:
    """Whether the end of the connection is the end of the body. RFC 9112 §6.3."""
    return find(response.headers, b"content-length") is None and find(response.headers, b"transfer-encoding") is None
