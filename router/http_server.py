"""The router as an HTTP/1.1 server: listeners, a task a request, draining."""

import asyncio
import logging
import ssl

from deepinfer_router.api import api_of
from deepinfer_router.deadlines import Deadlines
from deepinfer_router.error_body import render
from deepinfer_router.errors import Refusal
from deepinfer_router.exchange import Exchange, Handler
from deepinfer_router.http_coding import decoded
from deepinfer_router.http_config import Limits
from deepinfer_router.listen import listening_socket
from deepinfer_router.metrics import gauge
from deepinfer_router.outgoing import Turn
from deepinfer_router.server_connection import LINGER_S, Gate, ServerConnection

_log = logging.getLogger(__name__)
_BUFFERED = gauge(
    "request_buffered_bytes", "Of bodies of requests that took more than one read, or were compressed."
).labels()

STOPPING = "the router stops before the end of this answer; ask again"


class HttpServer:
    """Listeners and their connections, each request of which is given to `handler`. For the event loop's thread."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        gate: Gate | None = None,
    ) -> None:
        """What `handler` does not answer, or raises, becomes a 500; a Refusal its own status.

        `gate` raises Refusal for whom no memory is spent: it is asked before a body is waited for, or decompressed.
        """
        self.handler = handler
        self.gate = gate
        self.limits = limits = limits or Limits()
        # Read with each request, and attributes of pydantic's models are slow.
        self.max_header_bytes = limits.max_header_bytes
        self.max_headers = limits.max_headers
        self.max_body_bytes = limits.max_body_bytes
        self.keep_alive_s = limits.keep_alive_s
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self.turn = Turn(self.loop)
        self.connections: set[ServerConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.draining = False
        self.buffered_bytes = 0
        """Of bodies that took more than one read, or were compressed, until their answers are complete."""
        self._tls = tls
        self._listeners: list[asyncio.Server] = []

    async def listen(self, host: str, port: int, *, reuse_port: bool = False, backlog: int = 4096) -> int:
        """The port, chosen where it is 0. Raises OSError."""
        sock = listening_socket(host, port, reuse_port=reuse_port, backlog=backlog)
        server = await self.loop.create_server(
            lambda: ServerConnection(self),
            sock=sock,
            ssl=self._tls,
            backlog=backlog,
            ssl_handshake_timeout=self.limits.head_timeout_s if self._tls else None,
        )
        self._listeners.append(server)
        found: int = sock.getsockname()[1]
        return found

    def close_listeners(self) -> None:
        """Take no more connections."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()

    async def drain(self, seconds: float) -> int:
        """Close listeners and idle connections, wait for answers under way, then end those left; how many were left."""
        self.close_listeners()
        self.draining = True
        end = self.loop.time() + seconds
        for connection in list(self.connections):
            connection.close_if_idle()
        while self.connections and self.loop.time() < end:
            await asyncio.sleep(0.02)
        left = list(self.connections)
        for task in list(self.tasks):
            task.cancel()  # whoever has a client may tell it
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=1.0)
        for connection in left:
            connection.close()
        end = self.loop.time() + LINGER_S
        while self.connections and self.loop.time() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        while self.connections:
            await asyncio.sleep(0)
        return len(left)

    def buffer(self, size: int) -> None:
        """Count bytes of a body that is kept, to be given back by `unbuffer`. Raises Refusal: they are too many."""
        self.buffered_bytes += size
        _BUFFERED.inc(size)
        if self.buffered_bytes > self.limits.max_buffered_bytes:
            raise Refusal(503, "too_many_bytes", "bodies of too many requests are on their way", retry_after_s=1)

    def unbuffer(self, size: int) -> None:
        """They are kept no longer."""
        self.buffered_bytes -= size
        _BUFFERED.dec(size)

    async def run(self, exchange: Exchange, coding: bytes | None) -> None:
        """Have one exchange answered, whatever the handler does."""
        inflated = 0
        try:
            if coding is not None:
                exchange.body = await decoded(exchange.body, coding, self.limits.max_body_bytes)
                inflated = len(exchange.body)
                self.buffer(inflated)
                exchange.headers = [header for header in exchange.headers if header[0] != b"content-encoding"]
            await self.handler(exchange)
        except Refusal as refusal:
            _fail(exchange, refusal)
        except asyncio.CancelledError:
            if not exchange.closed and not exchange.ended:  # by `drain`
                _fail(exchange, Refusal(503, "shutting_down", STOPPING, retry_after_s=1))
            raise
        except Exception:
            _log.exception("%s %s", exchange.method, exchange.route)
            _fail(exchange, Refusal(500, "internal_error", "the router failed on this request; its log says why"))
        finally:
            if not exchange.ended and not exchange.closed:
                if not exchange.started:
                    _fail(exchange, Refusal(500, "internal_error", "the router gave no answer to this request"))
                else:
                    exchange.abort()
            if inflated:
                self.unbuffer(inflated)
            self.tasks.discard(exchange.task)
            del exchange.task  # a cancelled one refers to this frame, and so to the request's body


def _fail(exchange: Exchange, refusal: Refusal) -> None:
    if exchange.started:
        exchange.abort()
    else:
        exchange.respond(*render(refusal, api_of(exchange.method, exchange.route)))
