"""Connections that change their protocol go through, byte by byte."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop
from router_http_case import WAIT_S, Engine, Reader, Seen, Writer, ask, read_answer, request, until

from deepinfer_router.exchange import Exchange
from deepinfer_router.http_client import Upstream, UpstreamError
from deepinfer_router.http_server import HttpServer
from deepinfer_router.websocket import tunnel

UPGRADE = [(b"Connection", b"keep-alive, Upgrade"), (b"Upgrade", b"WebSocket"), (b"Sec-WebSocket-Key", b"x")]
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


async def switch_and_echo(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
    writer.write(SWITCH)
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


def case(body: Callable[[Engine, HttpServer, int, list[str]], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        engine = Engine()
        engine.script = switch_and_echo
        await engine.start()
        upstream = Upstream(f"http://127.0.0.1:{engine.port}")
        ends: list[str] = []

        async def handler(exchange: Exchange) -> None:
            assert exchange.upgrade == b"websocket"
            try:
                ends.append(await tunnel(exchange, upstream, [*exchange.headers, (b"x-request-id", b"1")]))
            except UpstreamError as error:
                ends.append(error.kind)
                exchange.respond(502, [], b"")

        server = HttpServer(handler)
        port = await server.listen("127.0.0.1", 0)
        try:
            async with asyncio.timeout(4 * WAIT_S):
                await body(engine, server, port, ends)
        finally:
            await server.drain(0.0)
            await engine.stop()
        assert not server.connections and not server.tasks

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_bytes_go_through_both_ways() -> None:
    async def run(engine: Engine, server: HttpServer, port: int, ends: list[str]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(request(b"GET", b"/v1/realtime?model=x", headers=UPGRADE) + b"\x81\x05ahead")
        assert await reader.readexactly(len(SWITCH)) == SWITCH
        assert await reader.readexactly(7) == b"\x81\x05ahead"
        for size in (1, 1000, 1 << 20):
            writer.write(b"\xff" * size)
            assert await reader.readexactly(size) == b"\xff" * size
        names = dict(engine.requests[0].headers)
        assert engine.requests[0].path == b"/v1/realtime?model=x"
        assert (names[b"upgrade"], names[b"connection"]) == (b"websocket", b"upgrade")
        assert (names[b"sec-websocket-key"], names[b"x-request-id"]) == (b"x", b"1")
        writer.close()
        await until(lambda: ends == ["client_gone"] and not engine.open)

    case(run)


def test_the_engine_ends_it() -> None:
    async def run(engine: Engine, server: HttpServer, port: int, ends: list[str]) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.write(SWITCH + b"bye")
            writer.close()

        engine.script = script
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(headers=UPGRADE))
        assert await reader.read(-1) == SWITCH + b"bye"
        writer.close()
        await until(lambda: ends == ["complete"])

    case(run)


def test_an_engine_that_refuses() -> None:
    async def run(engine: Engine, server: HttpServer, port: int, ends: list[str]) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
            writer.close()

        engine.script = script
        answer = await ask(port, headers=UPGRADE)
        assert (answer.status, answer.body) == (403, b"no")

    case(run)


def test_an_engine_that_goes_before_it_answers() -> None:
    async def run(engine: Engine, server: HttpServer, port: int, ends: list[str]) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.close()

        engine.script = script
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(headers=UPGRADE))
        assert (await read_answer(reader)).status == 502
        assert ends == ["reset"]
        assert await reader.read(-1) == b""  # what the client sent behind its request is gone, so the connection is
        writer.close()

    case(run)


def test_a_reader_that_is_slow_holds_the_writer() -> None:
    """Megabytes that a client does not read stay with the engine."""

    async def run(engine: Engine, server: HttpServer, port: int, ends: list[str]) -> None:
        written = 0

        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            nonlocal written
            writer.write(SWITCH)
            while written < 64 << 20:
                writer.write(b"x" * (1 << 20))
                await writer.drain()
                written += 1 << 20
            writer.close()

        engine.script = script
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(request(headers=UPGRADE))
        await reader.readexactly(len(SWITCH))
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.3)
        assert written < 48 << 20  # what sockets hold; the router none of it
        total = 0
        while data := await reader.read(1 << 20):
            total += len(data)
        assert total == 64 << 20
        writer.close()

    case(run)
