"""One client's HTTP/1.1 connection, as an asyncio protocol: reads a request, has it answered, reads the next."""

import asyncio
import logging
import sys
from asyncio import Transport
from collections.abc import Callable, Coroutine
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Any, Protocol, cast

from deepinfer_router.api import OTHER
from deepinfer_router.deadlines import NEVER, Deadlines
from deepinfer_router.error_body import render
from deepinfer_router.errors import Refusal
from deepinfer_router.exchange import Exchange
from deepinfer_router.http_config import Limits
from deepinfer_router.http_headers import Headers, status_line
from deepinfer_router.http_request import END, Request
from deepinfer_router.metrics import counter, gauge
from deepinfer_router.outgoing import Outgoing, Turn

_log = logging.getLogger(__name__)
_CONNECTIONS = gauge("client_connections", "Open connections of clients.").labels()
REFUSED = counter("http_refused", "Requests refused before they were whole, by why.", "reason")
LINGER_S = 2.0
"""How long a refused client may go on sending before its connection is reset, so that it reads the answer first."""
_AHEAD_BYTES = 64 << 10
"""Requests that a client may send before the one that is being answered is."""


Gate = Callable[[Headers], object]
"""Raises Refusal for who may not ask."""


class Owner(Protocol):
    """The server whose connection it is."""

    limits: Limits
    max_header_bytes: int
    max_headers: int
    max_body_bytes: int
    keep_alive_s: float
    loop: asyncio.AbstractEventLoop
    deadlines: Deadlines
    turn: Turn
    connections: "set[ServerConnection]"
    tasks: set[asyncio.Task[None]]
    draining: bool
    gate: Gate | None

    def buffer(self, size: int) -> None:
        """Count bytes of a body that is kept. Raises Refusal: they are too many."""

    def unbuffer(self, size: int) -> None:
        """They are kept no longer."""

    def run(self, exchange: Exchange, coding: bytes | None) -> Coroutine[Any, Any, None]:
        """Have one exchange answered."""


class ServerConnection(asyncio.Protocol):
    """One client's connection: reads a request, has it answered, reads the next."""

    __slots__ = (
        "deadline",
        "_server",
        "_transport",
        "_peer",
        "_buffer",
        "_request",
        "_exchange",
        "_received_at",
        "_buffered",
        "_ending",
        "_held",
        "_paused",
        "_unsent_bytes",
    )

    def __init__(self, server: Owner) -> None:
        self.deadline = NEVER
        self._server = server
        self._peer = ""
        self._buffer = b""  # of a head that is not whole, or of requests that came ahead
        self._request: Request | None = None  # whose body is being read
        self._exchange: Exchange | None = None  # that is being answered
        self._received_at = 0.0
        self._buffered = 0
        self._ending = False  # takes no further request
        self._held = False  # reading is paused
        self._paused = False  # writing is
        self._unsent_bytes = 0  # when the client was last looked at

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self._server
        self._transport = Outgoing(cast(Transport, transport), server.turn)  # uvloop's derive from none of asyncio's
        if len(server.connections) >= server.limits.max_connections or server.draining:
            self._transport.abort()
        server.connections.add(self)
        _CONNECTIONS.inc()
        server.deadlines.watch(self)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self._peer = peer[0]
        self.deadline = server.deadlines.now + server.limits.head_timeout_s

    def data_received(self, data: bytes) -> None:
        if self._ending and self._exchange is None:
            return
        if self._request is not None:
            self._read_body(self._request, data)
        elif self._exchange is not None:
            if self._exchange.raw is not None:
                self._exchange.raw(data)
                return
            self._buffer += data
            if len(self._buffer) > _AHEAD_BYTES and not self._held:
                self._held = True
                self._transport.pause_reading()
        else:
            if self._buffer:
                data = self._buffer + data
            self._read_head(data)

    def eof_received(self) -> bool:
        exchange = self._exchange
        if exchange is None:
            self._transport.flush()  # an answer that waits for the turn's end: the transport closes when this returns
            return False
        if not self._server.limits.half_close:
            self._transport.abort()  # and not after what is still to be sent
            self._client_gone()
            return False
        self._ending = True
        exchange.close_after()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        server = self._server
        server.connections.discard(self)
        _CONNECTIONS.dec()
        server.deadlines.forget(self)
        self._ending = True
        self._request = None
        if self._buffered:
            self._unbuffer()
        self._client_gone()

    def pause_writing(self) -> None:
        self._paused = True
        self._await_reader()
        if self._exchange is not None:
            self._exchange.pause(True)

    def resume_writing(self) -> None:
        self._paused = False
        if self._exchange is not None:
            self.deadline = NEVER
            self._exchange.pause(False)
        elif self._ending:
            self.deadline = self._server.deadlines.now + LINGER_S
        elif self._request is not None:
            self.deadline = self._server.deadlines.now + self._server.limits.body_timeout_s
        else:
            self.deadline = self._server.deadlines.now + self._server.keep_alive_s

    # the deadlines'

    def expired(self, now: float) -> None:
        """Of a head, a body, an idle connection, or a client that reads nothing."""
        unsent = self._unsent()
        if 0 < unsent < self._unsent_bytes:
            self._await_reader()  # slowly, but it reads
            return
        self.deadline = now + LINGER_S
        if self._exchange is not None or self._paused or self._ending:
            self._transport.abort()
        elif self._request is not None:
            self._refuse(Refusal(408, "body_timeout", "the body of the request did not arrive in time"))
        elif self._buffer:
            self._refuse(Refusal(408, "head_timeout", "the headers of the request did not arrive in time"))
        else:
            self._ending = True
            self._transport.close()

    # the exchange's

    def answered(self, reusable: bool) -> None:
        """Go on with what came ahead, or end."""
        self._exchange = None
        server = self._server
        if self._buffered:
            self._unbuffer()
        if not reusable or self._ending or server.draining:
            self._ending = True
            self._await_reader()
            self._transport.close()
            return
        if not self._paused:
            self.deadline = server.deadlines.now + server.keep_alive_s
        if self._buffer:
            server.loop.call_soon(self._read_ahead)

    def take_ahead(self) -> bytes:
        """What has come behind the request, and read on."""
        ahead, self._buffer = self._buffer, b""
        if self._held:
            self._held = False
            self._transport.resume_reading()
        return ahead

    # the server's

    def close_if_idle(self) -> None:
        """Unless a request has begun."""
        if self._exchange is None and self._request is None and not self._buffer:
            self._ending = True
            self._transport.close()

    def close(self) -> None:
        """Once what was written is sent."""
        self._ending = True
        self._transport.close()

    def abort(self) -> None:
        """At once."""
        self._transport.abort()

    def _await_reader(self) -> None:
        self._unsent_bytes = self._unsent()
        self.deadline = self._server.deadlines.now + self._server.limits.write_stall_s

    def _unsent(self) -> int:
        """Bytes that the client has not taken: the transport's and the kernel's."""
        descriptor = self._transport.get_extra_info("socket").fileno()
        queued = ioctl(descriptor, TIOCOUTQ, bytes(4)) if descriptor >= 0 else bytes(4)
        return self._transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _unbuffer(self) -> None:
        self._server.unbuffer(self._buffered)
        self._buffered = 0

    def _client_gone(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            for callback in exchange.client_gone():
                try:
                    callback()
                except Exception:
                    _log.exception("told that a client has gone")

    def _read_ahead(self) -> None:
        if self._exchange is None and self._request is None and not self._ending:
            data, self._buffer = self._buffer, b""
            self._read_head(data)
            if self._held and (self._exchange is None or len(self._buffer) <= _AHEAD_BYTES):
                self._held = False
                self._transport.resume_reading()

    def _read_head(self, data: bytes) -> None:
        server = self._server
        if data[:1] in b"\r\n":
            data = data.lstrip(b"\r\n")  # RFC 9112 §2.2: some clients end a body with one
            if not data:
                self._buffer = b""
                return
        end = data.find(END)
        if end < 0 or end > server.max_header_bytes:
            if not data[:1].isalpha():
                self._refuse(Refusal(400, "bad_request", "not a request: it does not begin with a method's name"))
                return
            if len(data) > server.max_header_bytes:
                self._refuse(
                    Refusal(
                        431,
                        "headers_too_large",
                        f"the request line and headers have more than {server.max_header_bytes} bytes; send fewer",
                    )
                )
                return
            if not self._buffer:
                self.deadline = server.loop.time() + server.limits.head_timeout_s
            self._buffer = data
            return
        end += len(END)
        self._buffer = b""
        self._received_at = server.loop.time()
        try:
            request = Request(data[:end])
            if len(request.headers) > server.max_headers:
                count, most = len(request.headers), server.max_headers
                raise Refusal(431, "too_many_headers", f"the request has {count} headers, and at most {most} are read")
            length = request.length
            whole = length is not None and len(data) - end >= length
            framing = request.framing
            ordinary = whole and b"content-encoding" not in framing and b"expect" not in framing
            if length is None or not ordinary or length > server.max_body_bytes:
                self._before_body(request, len(data) > end, whole)
            if length is not None and whole:
                self._begin(request, data[end : end + length], data[end + length :])
                return
        except Refusal as refusal:
            self._refuse(refusal)
            return
        self._request = request
        self.deadline = self._received_at + server.limits.body_timeout_s
        if len(data) > end:
            self._read_body(request, data[end:])

    def _before_body(self, request: Request, begun: bool, whole: bool) -> None:
        """Answer an Expect. Raises Refusal: the body need not come."""
        gate = self._server.gate
        if gate is not None and (not whole or b"content-encoding" in request.framing):
            gate(request.headers)
        limit = self._server.max_body_bytes
        if request.length is not None and request.length > limit:
            raise _too_large(request.length, limit)
        expected = request.framing.get(b"expect")
        if expected is None or request.http_1_0:
            return
        if expected.lower() != b"100-continue":
            raise Refusal(417, "expectation", f"Expect {expected[:50]!r}: only 100-continue is known")
        if not begun:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_body(self, request: Request, data: bytes) -> None:
        server = self._server
        try:
            rest = request.feed(data)
            if request.size > server.max_body_bytes:
                raise _too_large(request.size, server.max_body_bytes)
            if rest is None:
                self._buffered += len(data)
                server.buffer(len(data))
            else:
                self._request = None
                self._begin(request, request.body(), rest)
        except Refusal as refusal:
            self._refuse(refusal)

    def _begin(self, request: Request, body: bytes, rest: bytes) -> None:
        """Have a whole request answered. Raises Refusal."""
        server = self._server
        framing, url = request.framing, request.url
        exchange = Exchange(
            self,
            self._transport,
            request.method,
            url if url[:1] == b"/" else request.path(),
            request.headers,
            body,
            received_at=self._received_at,
            peer=self._peer,
            http_1_0=request.http_1_0,
            keep_alive=request.keep_alive and not server.draining,
            upgrade=request.upgrade() if b"upgrade" in framing else None,
        )
        self._exchange = exchange
        self._buffer = rest
        self.deadline = NEVER
        if self._paused:
            exchange.paused = True
            self._await_reader()
        coding = framing.get(b"content-encoding")
        # Without a name each is given one of its own, which takes a quarter of a microsecond.
        exchange.task = task = asyncio.Task(server.run(exchange, coding), loop=server.loop, name="request")
        server.tasks.add(task)

    def _refuse(self, refusal: Refusal) -> None:
        """Answer a request that no handler sees, and let the client read that before the connection ends."""
        REFUSED.labels(refusal.code).inc()
        self._ending = True
        self._request = None
        self._buffer = b""
        if self._buffered:
            self._unbuffer()
        self.deadline = self._server.loop.time() + LINGER_S
        status, headers, body = render(refusal, OTHER)
        length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        lines = [status_line(status), *map(b": ".join, headers), length]
        self._transport.write(b"\r\n".join(lines) + body)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()


def _too_large(size: int, limit: int) -> Refusal:
    return Refusal(413, "body_too_large", f"the body has {size} bytes or more, and at most {limit} are read")
