"""Connections that change their protocol go through, byte by byte."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from router_http_case import WAIT_S, Engine, Reader, Seen, Writer, ask, read_answer, request, until

from deepinfer_router.exchange import Exchange
from deepinfer_router.http_client import Upstream, UpstreamError
from deepinfer_router.http_request import Request
from deepinfer_router.http_server import HttpServer
from deepinfer_router.relay import relay
from deepinfer_router.websocket import change

UPGRADE = [(b"Connection", b"keep-alive, Upgrade"), (b"Upgrade", b"WebSocket"), (b"Sec-WebSocket-Key", b"x")]
PATIENCE_S = 5.0
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
                response = await change(exchange, upstream, [*exchange.headers, (b"x-request-id", b"1")], PATIENCE_S)
                if response is not None:
                    ends.append(await relay(response, exchange))
                else:
                    ends.append("client_gone" if exchange.closed else "complete")
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


REFUSALS = {
    "with a length": b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno",
    "in chunks": b"HTTP/1.1 403 Forbidden\r\ntransfer-encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n",
    "hints first": b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno",
    "ignored": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno",
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS.keys())
@pytest.mark.parametrize("split", [False, True])
def test_what_follows_a_change_that_is_refused_is_a_request_of_its_own(refusal: bytes, split: bool) -> None:
    """A tunnel to an engine that has refused would be a way around keys, limits and salts."""

    async def run(engine: Engine, server: HttpServer, port: int, ends: list[str]) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            for start in range(0, len(refusal), 1 if split else len(refusal)):
                writer.write(refusal[start : start + 1] if split else refusal)
                await writer.drain()
                await asyncio.sleep(0)

        engine.script = script
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b"GET", b"/first", headers=UPGRADE) + request(b"GET", b"/second", headers=UPGRADE))
        for _ in range(2):
            answer = await read_answer(reader)
            assert (answer.status, answer.body) == (200 if b" 200 " in refusal else 403, b"no")
        assert [seen.path for seen in engine.requests] == [b"/first", b"/second"]
        assert ends == ["complete", "complete"]  # each was asked for by the handler
        writer.write(b"\x81\x05frame")
        assert (await read_answer(reader)).status == 400
        writer.close()

    case(run)


def test_only_websocket_and_only_of_a_get_without_a_body_is_changed_to() -> None:
    """A body would go past all that reads bodies."""
    for head in (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\ncontent-length: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket, h2c\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\n\r\n",
        b"GET / HTTP/1.0\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    ):
        assert Request(head).upgrade() is None
    assert Request(request(b"GET", b"/", headers=UPGRADE)).upgrade() == b"websocket"


def test_an_engine_that_goes_before_it_answers() -> None:
    async def run(engine: Engine, server: HttpServer, port: int, ends: list[str]) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.write(b"HTTP/1.1 10")
            writer.close()

        engine.script = script
        answer = await ask(port, headers=UPGRADE)
        assert (answer.status, ends) == (502, ["reset"])

    case(run)


def test_an_engine_without_an_end_of_headers() -> None:
    async def run(engine: Engine, server: HttpServer, port: int, ends: list[str]) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.write(b"HTTP/1.1 101 X\r\n" + b"x: y\r\n" * 20_000)
            await writer.drain()
            await reader.read(1)

        engine.script = script
        assert (await ask(port, headers=UPGRADE)).status == 502
        assert ends == ["protocol"]
        await until(lambda: not engine.open)

    case(run)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 101 X\r\n"])
def test_an_engine_that_does_not_answer(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE_S", 0.2)

    async def run(engine: Engine, server: HttpServer, port: int, ends: list[str]) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.write(said)
            await reader.read(1)

        engine.script = script
        assert (await ask(port, headers=UPGRADE)).status == 502
        assert ends == ["timeout"]
        await until(lambda: not engine.open)

    case(run)


def test_a_client_that_goes_before_the_engine_answers() -> None:
    async def run(engine: Engine, server: HttpServer, port: int, ends: list[str]) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            await reader.read(1)

        engine.script = script
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(headers=UPGRADE))
        await until(lambda: len(engine.requests) == 1)
        writer.close()
        await until(lambda: ends == ["client_gone"] and not engine.open)

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
