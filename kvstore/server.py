"""Serves CHECK over a unix socket or TCP. One event loop talks; what takes long, a few threads compute.

What a peer can cost is bounded: connections, bytes on their way, time for a frame, requests that wait. A peer beyond a
bound is told so or loses its connection, and nobody else notices.
"""

import asyncio
import hmac
import logging
import ssl
from collections.abc import AsyncGenerator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from deepinfer_kvstore.check import Checker
from deepinfer_kvstore.metrics import Metrics
from deepinfer_kvstore.protocol import (
    LENGTH,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    MAX_REQUESTS,
    TICKET_BYTES,
    VERSION,
    Code,
    Held,
    Message,
    ProtocolError,
    pack,
    read_request,
    unpack,
)
from deepinfer_kvstore.rate import RateLimit

_log = logging.getLogger(__name__)
_READ_BYTES = 1 << 18
INLINE_BYTES = 96 << 10
INLINE_REQUESTS = 16
"""Frames of so few bytes and requests are answered at once, which takes less than waking a thread: the hashes of 3,000
blocks, or 24,000 tokens."""
MAX_REDEEMED = 1 << 16
"""Blocks of a ticket that are told."""


@dataclass(frozen=True)
class Limits:
    """What peers together, or one of them, may take."""

    connections: int = 256
    """At a time; as many over TCP again, so that strangers leave room for this node's own."""
    inflight_bytes: int = 64 << 20
    """Bytes of frames that are being read or answered, of all peers together."""
    waiting: int = 32
    """Frames that wait for a thread; more are turned away."""
    frame_seconds: float = 5.0
    """For a frame from its first byte to its last, for `hello`, and for a peer to take its answer."""
    idle_seconds: float = 300.0
    """Between two frames."""
    checks_per_second: float = 2000.0
    """Of one TCP address, or one connection to the unix socket; as many at once as a second allows."""


class Server:
    """One server, on any number of addresses. For the event loop's thread."""

    def __init__(
        self,
        checker: Checker,
        metrics: Metrics,
        *,
        token: str | None = None,
        limits: Limits = Limits(),
        threads: int = 2,
    ) -> None:
        """`token`: what peers over TCP must know."""
        self._checker = checker
        self._metrics = metrics
        self._token = token
        self._limits = limits
        self._rates = RateLimit(limits.checks_per_second)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="check")
        self._servers: list[asyncio.Server] = []
        self._local: set[asyncio.Task[None]] = set()
        self._remote: set[asyncio.Task[None]] = set()
        self._inflight_bytes = 0
        self._waiting = 0
        self._operations: dict[str, Callable[[Message], Message]] = {
            "check": self._check,
            "namespaces": self._namespaces,
            "redeem": self._redeem,
            "release": self._release,
        }

    async def listen_unix(self, path: Path) -> None:
        """Listen on a socket that only this user may use. The path must be free. Raises OSError."""

        def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._accept(reader, writer, None)

        server = await asyncio.start_unix_server(peer, path, limit=_READ_BYTES, start_serving=False)
        path.chmod(0o600)
        await server.start_serving()
        self._servers.append(server)

    async def listen_tcp(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listen on TCP, where peers must know the token; the port. Raises OSError."""
        assert self._token, "TCP without a token"

        def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if tls:
                assert isinstance(writer.transport, asyncio.Transport)
                writer.transport.pause_reading()  # what comes before `start_tls` would be lost
            self._accept(reader, writer, self._token, tls)

        server = await asyncio.start_server(peer, host, port, limit=_READ_BYTES)
        self._servers.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        """End all connections and stop listening."""
        for server in self._servers:
            server.close()
        peers = self._local | self._remote
        for peer in peers:
            peer.cancel()
        await asyncio.gather(*peers, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _accept(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        token: str | None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        peers = self._local if token is None else self._remote
        if len(peers) >= self._limits.connections:
            self._metrics.refused.labels("connections").inc()
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer, token, tls))
        peers.add(task)
        self._metrics.connections.inc()
        task.add_done_callback(self._peer_left)

    def _peer_left(self, task: "asyncio.Task[None]") -> None:
        self._local.discard(task)
        self._remote.discard(task)
        self._metrics.connections.dec()
        if not task.cancelled() and (error := task.exception()):
            _log.error("CHECK connection", exc_info=error)

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        token: str | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        peer = (writer.get_extra_info("peername") or [None])[0] if token else writer
        try:
            if tls:  # here and not by the listener, which would not count those that are at it
                async with self._on_time(asyncio.get_running_loop().time() + self._limits.frame_seconds):
                    await writer.start_tls(tls)
            async with self._frame(reader, self._limits.frame_seconds, MAX_HELLO_BYTES) as body:
                answer = _greet(unpack(body), token)
            while True:
                await self._write(writer, answer)
                async with self._frame(reader, self._limits.idle_seconds, MAX_FRAME_BYTES) as body:
                    try:
                        answer = await self._answer(unpack(body), len(body), peer)
                    except ProtocolError as error:
                        self._metrics.refused.labels(str(error.code)).inc()
                        answer = error.message()
        except ProtocolError as error:
            self._metrics.refused.labels(str(error.code)).inc()
            with suppress(OSError):
                await self._write(writer, error.message())
        except (OSError, EOFError):
            pass  # it went away, or was too slow
        finally:
            self._rates.forget(writer)
            writer.transport.abort()

    @asynccontextmanager
    async def _frame(
        self, reader: asyncio.StreamReader, wait_seconds: float, max_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        """A frame's body. Its bytes count as on their way until the caller has dealt with them.

        Raises:
            ProtocolError: it is too large, at all or for the moment.
            OSError, EOFError: the peer left, or was too slow.
        """
        async with asyncio.timeout(wait_seconds):
            first = await reader.readexactly(1)
        deadline = asyncio.get_running_loop().time() + self._limits.frame_seconds
        async with self._on_time(deadline):
            (size,) = LENGTH.unpack(first + await reader.readexactly(LENGTH.size - 1))
        if size > max_bytes:
            raise ProtocolError(Code.MALFORMED, f"a frame of {size} bytes: at most {max_bytes} are read")
        if self._inflight_bytes + size > self._limits.inflight_bytes:
            raise ProtocolError(Code.BUSY, "too many bytes on their way")
        self._inflight_bytes += size
        try:
            async with self._on_time(deadline):
                body = await reader.readexactly(size)
            yield body
        finally:
            self._inflight_bytes -= size

    @asynccontextmanager
    async def _on_time(self, deadline: float) -> AsyncGenerator[None, None]:
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            self._metrics.refused.labels("slow").inc()
            raise

    async def _write(self, writer: asyncio.StreamWriter, answer: Message) -> None:
        writer.write(pack(answer))
        async with self._on_time(asyncio.get_running_loop().time() + self._limits.frame_seconds):
            await writer.drain()

    async def _answer(self, message: Message, size: int, peer: Hashable) -> Message:
        operation = message.get("op")
        work = self._operations.get(operation) if isinstance(operation, str) else None
        if work is None:
            raise ProtocolError(Code.MALFORMED, f"there are {', '.join(self._operations)}, not {operation!r}"[:200])
        requests = message.get("requests")
        count = max(1, len(requests)) if isinstance(requests, list) else 1
        if not self._rates.allows(peer, count):
            raise ProtocolError(Code.LIMITED, f"more than {self._limits.checks_per_second:g} requests a second")
        if operation != "redeem" and size <= INLINE_BYTES and count <= INLINE_REQUESTS:
            return work(message)
        if self._waiting >= self._limits.waiting:
            raise ProtocolError(Code.BUSY, "too many requests wait")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, message)
        finally:
            self._waiting -= 1

    def _check(self, message: Message) -> Message:
        requests = message.get("requests")
        if not isinstance(requests, list) or len(requests) > MAX_REQUESTS:
            raise ProtocolError(Code.MALFORMED, f"requests must be a list of at most {MAX_REQUESTS}")
        return {"replies": [self._check_one(request) for request in requests]}

    def _check_one(self, request: object) -> Message:
        try:
            return self._checker.check(read_request(request)).message()
        except ProtocolError as error:
            return error.message()

    def _namespaces(self, _: Message) -> Message:
        found = [(namespace.name, namespace.descriptor) for namespace in self._checker.namespaces.all()]
        return {
            "namespaces": [
                {
                    "name": name,
                    "model": descriptor.model,
                    "hash_tokens": descriptor.hash_tokens,
                    "none_hash": bytes.fromhex(descriptor.none_hash),
                }
                for name, descriptor in found
            ]
        }

    def _redeem(self, message: Message) -> Message:
        found = self._checker.redeem(_ticket(message))
        keys = found.keys()[:MAX_REDEEMED]
        namespace = self._checker.find(found.namespace)
        entries = zip(keys, namespace.index.get_many(keys), strict=True)
        blocks = [(key, entry) for key, entry in entries if entry]
        return Held(found.namespace, max(0.0, found.deadline - monotonic()), blocks).message()

    def _release(self, message: Message) -> Message:
        self._checker.release(_ticket(message))
        return {}


def _greet(hello: Message, token: str | None) -> Message:
    if hello.get("op") != "hello" or hello.get("version") != VERSION:
        raise ProtocolError(Code.VERSION, f"this server speaks version {VERSION}, and the first frame is a hello")
    shown = hello.get("token", "")
    if token and not (isinstance(shown, str) and hmac.compare_digest(shown.encode(), token.encode())):
        raise ProtocolError(Code.TOKEN, "not the token of this server")
    return {"version": VERSION}


def _ticket(message: Message) -> bytes:
    ticket = message.get("ticket")
    if not isinstance(ticket, bytes) or len(ticket) != TICKET_BYTES:
        raise ProtocolError(Code.MALFORMED, f"ticket must be {TICKET_BYTES} bytes")
    return ticket
