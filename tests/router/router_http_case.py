"""An engine of a few lines on a socket, the router's data path before it, and a client that shows every byte."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import uvloop

from deepinfer_router.exchange import Exchange
from deepinfer_router.http_client import Upstream, UpstreamError
from deepinfer_router.http_config import Limits, Timeouts
from deepinfer_router.http_server import HttpServer
from deepinfer_router.relay import Outcome, relay

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Headers = list[tuple[bytes, bytes]]
WAIT_S = 30.0


@dataclass
class Seen:
    """A request as an engine read it."""

    method: bytes
    path: bytes
    headers: Headers
    body: bytes


Script = Callable[["Engine", Seen, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def silent(engine: "Engine", seen: Seen, reader: Reader, writer: Writer) -> None:
    """Until its client leaves."""
    assert await reader.read(1) == b""
    writer.close()


async def echo(engine: "Engine", seen: Seen, reader: Reader, writer: Writer) -> None:
    body = b"%b %b %b" % (seen.method, seen.path, seen.body)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % len(body))
    if seen.method != b"HEAD":
        writer.write(body)


def says(*pieces: bytes) -> Script:
    """Writes these, each as its own segment as far as TCP lets it."""

    async def script(engine: "Engine", seen: Seen, reader: Reader, writer: Writer) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return script


def chunked(*pieces: bytes, kind: bytes = b"text/event-stream", end: bool = True) -> Script:
    """A chunked answer."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind
    return says(head, *[b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces], *([b"0\r\n\r\n"] if end else []))


class Engine:
    """Answers by `script`; leave a connection by writer.close() or abort()."""

    def __init__(self) -> None:
        self.script: Script = echo
        self.requests: list[Seen] = []
        self.accepted = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, **kwargs: Any) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 28, **kwargs)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: Reader, writer: Writer) -> None:
        self.accepted += 1
        self.open.add(writer)
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        try:
            while not writer.is_closing():
                seen = await read_request(reader)
                self.requests.append(seen)
                await self.script(self, seen, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open.discard(writer)
            self._tasks.discard(task)
            writer.close()


async def read_request(reader: asyncio.StreamReader) -> Seen:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    method, path, _ = first.split(b" ")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    length = int(dict(headers).get(b"content-length", b"0"))
    return Seen(method, path, headers, await reader.readexactly(length))


@dataclass
class Answer:
    """What a client read."""

    status: int
    headers: Headers
    body: bytes
    framed: bytes = b""
    """The body as it was on the wire."""

    def header(self, name: bytes) -> bytes | None:
        return dict(self.headers).get(name)


async def read_answer(reader: asyncio.StreamReader, method: bytes = b"GET") -> Answer:
    """One answer; by its own framing, written here a second time."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    status = int(first.split(b" ")[1])
    named = dict(headers)
    if method == b"HEAD" or status in (204, 304) or status < 200:
        return Answer(status, headers, b"")
    if named.get(b"transfer-encoding") == b"chunked":
        pieces, framed = [], []
        while True:
            line = await reader.readuntil(b"\r\n")
            piece = await reader.readexactly(int(line, 16))
            assert await reader.readexactly(2) == b"\r\n"
            pieces.append(piece)
            framed.append(line + piece + b"\r\n")
            if not piece:
                return Answer(status, headers, b"".join(pieces), b"".join(framed))
    if b"content-length" in named:
        body = await reader.readexactly(int(named[b"content-length"]))
    else:
        body = await reader.read(-1)
    return Answer(status, headers, body, body)


async def ask(
    port: int, method: bytes = b"GET", path: bytes = b"/", body: bytes = b"", headers: Headers | None = None
) -> Answer:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(method, path, body, headers))
        return await asyncio.wait_for(read_answer(reader, method), WAIT_S)
    finally:
        writer.close()


def request(method: bytes = b"GET", path: bytes = b"/", body: bytes = b"", headers: Headers | None = None) -> bytes:
    lines = [b"%b %b HTTP/1.1\r\nhost: a\r\n" % (method, path)]
    lines += [b"%b: %b\r\n" % header for header in headers or []]
    if body:
        lines.append(b"content-length: %d\r\n" % len(body))
    return b"".join(lines) + b"\r\n" + body


@dataclass
class Proxy:
    """The data path with a handler that relays everything to one engine."""

    engine: Engine
    server: HttpServer
    upstream: Upstream
    port: int
    outcomes: list[Outcome | UpstreamError] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)


def case(
    body: Callable[[Proxy], Coroutine[Any, Any, None]],
    *,
    limits: Limits | None = None,
    timeouts: Timeouts | None = None,
    stall_s: float | None = None,
    first_data_s: float | None = None,
) -> None:
    """Run `body` on a uvloop with an engine and a proxy before it."""

    async def run() -> None:
        engine = Engine()
        await engine.start()
        upstream = Upstream(f"http://127.0.0.1:{engine.port}", timeouts)

        async def handler(exchange: Exchange) -> None:
            try:
                response = await upstream.send(exchange.method, exchange.path, exchange.headers, exchange.body)
            except UpstreamError as error:
                proxy.outcomes.append(error)
                exchange.respond(502, [], error.message.encode())
                return
            outcome = await relay(
                response, exchange, on_data=proxy.data.append, stall_s=stall_s, first_data_s=first_data_s
            )
            proxy.outcomes.append(outcome)
            if outcome in ("upstream_lost", "stalled") and not exchange.started:
                exchange.respond(502, [], outcome.encode())

        server = HttpServer(handler, limits)
        proxy = Proxy(engine, server, upstream, await server.listen("127.0.0.1", 0))
        try:
            async with asyncio.timeout(4 * WAIT_S):
                await body(proxy)
        finally:
            await server.drain(0.0)
            await upstream.close()
            await engine.stop()
        assert not server.connections and not server.tasks and server.buffered_bytes == 0
        assert upstream.connections == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def until(condition: Callable[[], object]) -> None:
    """Poll for at most WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)
