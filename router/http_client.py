"""The router as an HTTP/1.1 client of one engine: pooled connections, answers handed on piece by piece."""

import asyncio
import logging
import ssl
from asyncio import Transport
from collections.abc import AsyncIterator, Callable
from typing import Literal, Protocol, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from deepinfer_router.deadlines import NEVER, Deadlines
from deepinfer_router.errors import RouterConfigError
from deepinfer_router.http_config import EngineTls, Timeouts
from deepinfer_router.http_headers import HOP_BY_HOP, Headers, find

_log = logging.getLogger(__name__)
_HELD_BYTES = 256 << 10
"""Of an answer that nobody takes: then its connection is read no further."""
_JOINED_BYTES = 64 << 10
_RACE_S = 1.0
"""A connection of the pool that the engine closes within this time of a request was being closed already."""
_OWN = HOP_BY_HOP | {b"host", b"content-length", b"expect"}

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


class UpstreamResponse:
    """An engine's answer: its head, and its body to be taken once, by `read`, by iteration, or by `relay`."""

    __slots__ = ("status", "headers", "complete", "error", "rest", "sink", "connection")

    def __init__(self, connection: "EngineConnection", status: int, headers: Headers) -> None:
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

    async def read(self, limit: int) -> bytes:
        """The whole body, at most `limit` bytes. Raises UpstreamError."""
        pieces: list[bytes] = []
        size = 0
        async for piece in self:
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
        if self._size > _HELD_BYTES and not complete:
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


class EngineConnection(asyncio.Protocol):
    """One connection to an engine, in use or in its pool."""

    __slots__ = (
        "deadline",
        "heard_at",
        "name",
        "on_body",
        "_upstream",
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
    )

    def __init__(self, upstream: "Upstream") -> None:
        self.deadline = NEVER
        self.heard_at = 0.0
        self.name = upstream.url
        self._upstream = upstream
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

    # the pool's

    def send(
        self, head: bytes, body: bytes, head_only: bool, first_byte_s: float | None
    ) -> "asyncio.Future[UpstreamResponse]":
        """Send a request; its answer's head. The future raises UpstreamError."""
        upstream = self._upstream
        self._waiter = waiter = upstream.loop.create_future()
        if self._closed:
            self._silent, self._sent_at = True, upstream.loop.time()
            waiter.set_exception(UpstreamError("reset", True, f"{self.name} has closed the connection"))
            return waiter
        self._sent_at = now = upstream.loop.time()
        self._head_only = head_only
        self._silent = True
        self.deadline = NEVER if first_byte_s is None else now + first_byte_s
        if len(body) < _JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return waiter

    @property
    def raced(self) -> bool:
        """Whether the engine closed the connection without a byte, so soon that it cannot have begun to answer."""
        return self._silent and self._upstream.loop.time() - self._sent_at < _RACE_S

    # the response's

    def patience(self, first_data_s: float | None, stall_s: float | None) -> None:
        """How long the first piece of the body, and each later one, may take."""
        self._stall_s = stall_s
        self._first = True
        self.deadline = NEVER if first_data_s is None else self._upstream.loop.time() + first_data_s

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
            self.heard_at = self._upstream.loop.time()
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
        self._transport = cast(Transport, transport)  # uvloop's derive from none of asyncio's
        self._upstream.opened(self)

    def data_received(self, data: bytes) -> None:
        upstream = self._upstream
        self.heard_at = upstream.deadlines.now
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
                if not self._held and sum(map(len, pieces)) > _HELD_BYTES:
                    self.hold(True)
            elif pieces:
                body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                pieces.clear()
                if self._first:
                    self._begun()
                sink.data(body, False)
        if broken is not None and not self._closed:
            self.lose(UpstreamError("protocol", True, f"{self.name} sent what is not HTTP/1.1: {broken}"))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._upstream.ended(self)
        response = self._response
        if response is not None and exc is None and not response.error and _until_close(response):
            response.complete = True
            self._ended(response, b"".join(self._pieces), False)
            return
        why = f": {exc}" if exc else ""
        self._fail(UpstreamError("reset", True, f"{self.name} closed the connection before the answer's end{why}"))

    # the deadlines'

    def expired(self, now: float) -> None:
        """Of an idle connection, a head, or the next piece of a body."""
        if self._waiter is not None:
            self.lose(UpstreamError("timeout", True, f"{self.name} sent no answer within {now - self._sent_at:.1f} s"))
        elif self._response is None:
            self._upstream.unused(self)
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

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        if status < 200:
            return  # 100 Continue, 103 Early Hints: the answer is still to come
        self._reusable = self._parser.should_keep_alive() and not self._head_only
        self._response = response = UpstreamResponse(self, status, headers)
        response.complete = self._head_only

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
        if clean and self._reusable and not self._closed:
            self._upstream.give_back(self)
        elif not self._closed:
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


class Upstream:
    """One engine's address and the connections to it. For the event loop's thread."""

    def __init__(self, url: str, timeouts: Timeouts | None = None, tls: EngineTls | None = None) -> None:
        """`url`: http://host[:port] or https://. Raises RouterConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise RouterConfigError(f"engine {url!r}: http://host:port or https://host:port is needed")
        self.url = url
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self.timeouts = timeouts or Timeouts()
        self._host = parts.hostname
        self._secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._tls: ssl.SSLContext | None = (tls or EngineTls()).context() if self._secure else None
        self._server_name = (tls.server_name if tls else None) or parts.hostname
        self._host_line = b" HTTP/1.1\r\nhost: " + parts.netloc.rpartition("@")[2].encode() + b"\r\n"
        self._idle: list[EngineConnection] = []
        self._open: set[EngineConnection] = set()

    @property
    def connections(self) -> int:
        """Open ones, idle ones included."""
        return len(self._open)

    async def send(
        self, method: bytes, path: bytes, headers: Headers, body: bytes, *, first_byte_s: float | None = None
    ) -> UpstreamResponse:
        """Send a request, and wait for its answer's head, at most `first_byte_s` (else the configured time).

        Of `headers` those that concern a connection, host and content-length are left out: they are written here. A
        connection of the pool that turns out to be closed is replaced once, by a fresh one.

        Raises:
            UpstreamError: no answer.
        """
        head = self._head(method, path, headers, len(body))
        if first_byte_s is None:
            first_byte_s = self.timeouts.first_byte_s
        head_only = method == b"HEAD"
        if self._idle:
            connection = self._idle.pop()
            try:
                return await self._answer(connection, connection.send(head, body, head_only, first_byte_s))
            except UpstreamError as error:
                if error.kind != "reset" or not connection.raced:
                    raise
        connection = await self.connect()
        return await self._answer(connection, connection.send(head, body, head_only, first_byte_s))

    async def connect(self) -> EngineConnection:
        """A fresh connection, not of the pool. Raises UpstreamError."""
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                _, connection = await self.open(lambda: EngineConnection(self))
        except TimeoutError:
            why = f"no connection within {self.timeouts.connect_s:g} s"
            raise UpstreamError("connect", False, f"{self.url}: {why}") from None
        except OSError as error:
            raise UpstreamError("connect", False, f"{self.url}: {error}") from None
        assert isinstance(connection, EngineConnection)
        return connection

    async def open(
        self, protocol: Callable[[], asyncio.BaseProtocol]
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """A transport to the engine with a protocol of any kind. Raises OSError."""
        return await self.loop.create_connection(
            protocol,
            self._host,
            self._port,
            ssl=self._tls,
            server_hostname=self._server_name if self._tls else None,
        )

    async def close(self) -> None:
        """End all connections; answers under way are lost."""
        for connection in list(self._open):
            connection.lose(UpstreamError("reset", True, f"{self.url}: the router closes its connections"))
        while self._open:
            await asyncio.sleep(0)

    # the connections'

    def opened(self, connection: EngineConnection) -> None:
        """It is there."""
        self._open.add(connection)
        self.deadlines.watch(connection)

    def ended(self, connection: EngineConnection) -> None:
        """It is no more."""
        self._open.discard(connection)
        self.deadlines.forget(connection)
        self.unused(connection)

    def unused(self, connection: EngineConnection) -> None:
        """It must not be taken from the pool."""
        if connection in self._idle:
            self._idle.remove(connection)

    def give_back(self, connection: EngineConnection) -> None:
        """It is idle."""
        connection.deadline = self.deadlines.now + self.timeouts.idle_s
        self._idle.append(connection)

    async def _answer(
        self, connection: EngineConnection, answer: "asyncio.Future[UpstreamResponse]"
    ) -> UpstreamResponse:
        try:
            return await answer
        except asyncio.CancelledError:
            connection.lose(UpstreamError("reset", True, "cancelled by the router"))
            raise

    def _head(self, method: bytes, path: bytes, headers: Headers, length: int) -> bytes:
        lines = [b"%b %b" % (method, path), self._host_line]
        lines += [b"%b: %b\r\n" % header for header in headers if header[0] not in _OWN]
        if length or method not in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
            lines.append(b"content-length: %d\r\n" % length)
        lines.append(b"\r\n")
        return b"".join(lines)


def _until_close(response: UpstreamResponse) -> bool:
    """Whether the end of the connection is the end of the body. RFC 9112 §6.3."""
    return find(response.headers, b"content-length") is None and find(response.headers, b"transfer-encoding") is None
