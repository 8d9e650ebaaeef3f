"""The router as an HTTP/1.1 client of one engine: a pool of connections."""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from deepinfer_router.coalescing import Coalescing
from deepinfer_router.deadlines import Deadlines
from deepinfer_router.engine_connection import EngineConnection
from deepinfer_router.errors import RouterConfigError
from deepinfer_router.http_config import EngineTls, Timeouts
from deepinfer_router.http_headers import HOP_BY_HOP, Headers
from deepinfer_router.http_response import UpstreamError, UpstreamResponse
from deepinfer_router.metrics import counter
from deepinfer_router.outgoing import Turn

__all__ = ["Upstream", "UpstreamError", "UpstreamResponse"]

_OPENED = counter("engine_connections", "Connections opened to engines.").labels()
_RACES = counter(
    "engine_connection_races", "Requests sent again since the engine was closing the connection that was taken."
).labels()
_OWN = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


class Upstream:
    """One engine's address and the connections to it. For the event loop's thread."""

    def __init__(
        self, url: str, timeouts: Timeouts | None = None, tls: EngineTls | None = None, turn: Turn | None = None
    ) -> None:
        """`url`: http://host[:port] or https://. `turn`: of all that the loop asks. Raises RouterConfigError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise RouterConfigError(f"engine {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise RouterConfigError(f"engine {url!r}: http://host:port or https://host:port is needed")
        self.url = url
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self.turn = turn or Turn(self.loop)
        timeouts = timeouts or Timeouts()
        # Attributes of pydantic's models are slow.
        self._connect_s, self._first_byte_s, self._idle_s = timeouts.connect_s, timeouts.first_byte_s, timeouts.idle_s
        self.coalescing = Coalescing(self.loop, timeouts.coalesce_s)
        self._host = parts.hostname
        self._secure = parts.scheme == "https"
        self._port = port or (443 if self._secure else 80)
        self._tls: ssl.SSLContext | None = (tls or EngineTls()).context() if self._secure else None
        self._server_name = (tls.server_name if tls else None) or parts.hostname
        self._host_line = b"host: " + parts.netloc.rpartition("@")[2].encode()
        self._idle: dict[EngineConnection, None] = {}  # in the order of their return
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
        connection of the pool that turns out to be closed is replaced once, by a fresh one. So is a fresh one that
        closed before anything was sent, as idle ones do: on a busy loop its opener may run late.

        Raises:
            UpstreamError: no answer.
        """
        head = self.head(method, path, headers, len(body))
        if first_byte_s is None:
            first_byte_s = self._first_byte_s
        raced = replaced = False
        while True:
            pooled = bool(self._idle) and not raced
            connection = self._idle.popitem()[0] if pooled else await self._fresh(raced)
            answer = connection.send(head, body, method == b"HEAD", first_byte_s)
            try:
                return await answer
            except UpstreamError as error:
                if not error.sent:
                    error.sent = raced
                    if replaced:
                        raise
                    replaced = True
                elif not pooled or error.kind != "reset" or not connection.raced:
                    raise
                else:
                    raced = True
                    _RACES.inc()
            except asyncio.CancelledError:
                if answer.cancelled():
                    connection.lose(UpstreamError("reset", True, "cancelled by the router"))
                elif answer.exception() is None:
                    answer.result().cancel()  # came together with the cancelling; a whole one's connection is another's
                raise
            finally:
                del answer  # whose error refers to this frame, and so to the request's body

    async def open(self, protocol: Callable[[], asyncio.BaseProtocol]) -> asyncio.BaseProtocol:
        """A connection that is not of the pool, with a protocol of any kind. Raises UpstreamError."""
        made: list[asyncio.BaseProtocol] = []

        def make() -> asyncio.BaseProtocol:
            made.append(protocol())
            return made[0]

        try:
            async with asyncio.timeout(self._connect_s):
                await self.loop.create_connection(
                    make,
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._server_name if self._tls else None,
                )
        except asyncio.CancelledError:
            self._forsake(made)
            raise
        except TimeoutError:
            self._forsake(made)
            why = f"no connection within {self._connect_s:g} s"
            raise UpstreamError("connect", False, f"{self.url}: {why}") from None
        except OSError as error:
            raise UpstreamError("connect", False, f"{self.url}: {error}") from None
        return made[0]

    def adopt(self, transport: asyncio.Transport, data: bytes) -> "asyncio.Future[UpstreamResponse]":
        """The answer that begins with `data`, to a request sent over a connection by `open`: it is the pool's then."""
        connection = EngineConnection(self)
        connection.connection_made(transport)
        answer = connection.send(b"", b"", False, None)
        transport.set_protocol(connection)
        connection.data_received(data)
        return answer

    def head(self, method: bytes, path: bytes, headers: Headers, length: int, *, upgrade: bytes | None = None) -> bytes:
        """A request up to its body of `length` bytes."""
        lines = [b"%b %b HTTP/1.1" % (method, path), self._host_line]
        lines += [b": ".join(header) for header in headers if header[0] not in _OWN]
        if length or method not in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
            lines.append(b"content-length: %d" % length)
        if upgrade is not None:
            lines.append(b"connection: upgrade\r\nupgrade: %b" % upgrade)
        lines.append(b"\r\n")
        return b"\r\n".join(lines)

    async def close(self) -> None:
        """End all connections; answers under way are lost."""
        for connection in list(self._open):
            connection.lose(UpstreamError("reset", True, f"{self.url}: the router closes its connections"))
        while self._open:
            await asyncio.sleep(0)

    # the connections'

    def opened(self, connection: EngineConnection) -> None:
        """It is there, idle until a request is sent: whoever opened it may have been cancelled meanwhile."""
        _OPENED.inc()
        self._open.add(connection)
        self.deadlines.watch(connection)
        connection.deadline = self.loop.time() + self._idle_s

    def ended(self, connection: EngineConnection) -> None:
        """It is no more."""
        self._open.discard(connection)
        self.deadlines.forget(connection)
        self.unused(connection)

    def unused(self, connection: EngineConnection) -> None:
        """It must not be taken from the pool."""
        self._idle.pop(connection, None)

    def give_back(self, connection: EngineConnection) -> None:
        """It is idle."""
        connection.deadline = self.deadlines.now + self._idle_s
        self._idle[connection] = None

    def _forsake(self, made: list[asyncio.BaseProtocol]) -> None:
        """Its opening was given up, perhaps when it was there: uvloop closes it then, and does not tell it so."""
        for connection in made:
            if connection in self._open:
                connection.connection_lost(None)

    async def _fresh(self, raced: bool) -> EngineConnection:
        """`raced`: the request may have been seen over another connection. Raises UpstreamError."""
        try:
            return cast(EngineConnection, await self.open(lambda: EngineConnection(self)))
        except UpstreamError as error:
            error.sent = raced
            raise
