"""Slow, silent, broken and leaving peers, on both sides."""

import asyncio
import logging
import socket

import pytest
from router_http_case import (
    WAIT_S,
    Engine,
    Proxy,
    Reader,
    Seen,
    Writer,
    ask,
    case,
    chunked,
    echo,
    read_answer,
    request,
    says,
    silent,
    until,
)

from deepinfer_router.engine_connection import EngineConnection
from deepinfer_router.exchange import Exchange
from deepinfer_router.http_client import Upstream, UpstreamError
from deepinfer_router.http_config import Limits, Timeouts

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def stalling(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
    writer.write(STREAM + b"9\r\ndata: 1\n\n\r\n")
    await silent(engine, seen, reader, writer)


async def headed(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
    writer.write(STREAM)
    await silent(engine, seen, reader, writer)


@pytest.mark.parametrize("script", [stalling, headed])
def test_a_client_that_leaves_takes_the_engine_s_work_with_it(script: object) -> None:
    """LiteLLM#37140 and others: the engine goes on generating for nobody."""

    async def run(proxy: Proxy) -> None:
        proxy.engine.script = script  # type: ignore[assignment]
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request(b"POST", b"/", b"{}"))
        await until(lambda: proxy.upstream.connections == 1 and proxy.engine.open)
        await asyncio.sleep(0.05)
        writer.close()
        await until(lambda: not proxy.engine.open and proxy.outcomes == ["client_gone"])

    case(run)


def test_a_client_that_leaves_is_noticed_in_the_same_turn_of_the_loop() -> None:
    async def run(proxy: Proxy) -> None:
        turns: list[str] = []
        exchanges: list[Exchange] = []

        async def handler(exchange: Exchange) -> None:
            exchanges.append(exchange)
            exchange.on_close(lambda: 1 / 0)  # another's failure changes nothing
            exchange.on_close(lambda: turns.append("told"))
            exchange.start(200, [])
            exchange.write(b"x")
            await asyncio.sleep(WAIT_S)

        proxy.server.handler = handler
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request())
        await until(lambda: exchanges)
        [connection] = proxy.server.connections
        assert connection.eof_received() is False
        assert turns == ["told"] and exchanges[0].closed
        exchanges[0].write(b"more")
        exchanges[0].end()
        exchanges[0].on_close(lambda: turns.append("late"))
        assert turns == ["told", "late"]
        writer.close()
        await until(lambda: not proxy.server.connections)
        for task in proxy.server.tasks:
            task.cancel()
        await until(lambda: not proxy.server.tasks)
        assert turns == ["told", "late"]

    case(run)


def test_a_client_that_leaves_before_the_answer_s_head() -> None:
    """Cancelling the handler's task closes the connection that waits."""

    async def run(proxy: Proxy) -> None:
        proxy.engine.script = silent
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request(b"POST", b"/", b"{}"))
        await until(lambda: proxy.engine.requests)
        [task] = proxy.server.tasks
        [connection] = proxy.server.connections
        connection._exchange.on_close(task.cancel)
        writer.close()
        await until(lambda: not proxy.engine.open and not proxy.server.tasks)

    case(run)


@pytest.mark.parametrize("half_close", [False, True])
def test_half_closed_clients(half_close: bool) -> None:
    async def run(proxy: Proxy) -> None:
        gate = asyncio.Event()

        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            await gate.wait()
            await echo(engine, seen, reader, writer)

        proxy.engine.script = script
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request(b"POST", b"/", b"last"))
        writer.write_eof()
        await until(lambda: proxy.engine.requests)
        await asyncio.sleep(0.05)
        gate.set()
        whole = await asyncio.wait_for(reader.read(-1), WAIT_S)
        assert whole.endswith(b"POST / last") == half_close and (whole == b"") == (not half_close)
        writer.close()

    case(run, limits=Limits(half_close=half_close))


@pytest.mark.parametrize("half_close", [False, True])
def test_a_client_that_shuts_its_side_just_after_its_answer_gets_it(half_close: bool) -> None:
    """The end of what it sends is read in the turn in which the answer is given, of which it is written at the end."""

    async def run(proxy: Proxy) -> None:
        async def handler(exchange: Exchange) -> None:
            proxy.server.turn.at_once = 0
            exchange.respond(200, [], b"whole")
            client.shutdown(socket.SHUT_WR)

        proxy.server.handler = handler
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(request())
            client.setblocking(False)
            pieces = []
            while piece := await asyncio.wait_for(proxy.server.loop.sock_recv(client, 1 << 16), WAIT_S):
                pieces.append(piece)
        assert b"".join(pieces).endswith(b"whole")

    case(run, limits=Limits(half_close=half_close))


def test_a_stalled_stream_is_given_up_between_events() -> None:
    """vllm#41530, vllm#40926: HTTP is up and no token comes."""

    async def run(proxy: Proxy) -> None:
        proxy.engine.script = stalling
        with pytest.raises(asyncio.IncompleteReadError):
            await ask(proxy.port, b"POST", b"/", b"{}")
        assert (proxy.outcomes, proxy.data) == (["stalled"], [b"data: 1\n\n"])
        await until(lambda: not proxy.engine.open)

    case(run, stall_s=0.4)


def test_a_stream_that_trickles_is_not_stalled() -> None:
    async def run(proxy: Proxy) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            await says(STREAM)(engine, seen, reader, writer)
            for _ in range(20):
                writer.write(b"9\r\ndata: 1\n\n\r\n")
                await asyncio.sleep(0.1)
            writer.write(b"0\r\n\r\n")

        proxy.engine.script = script
        assert (await ask(proxy.port, b"POST", b"/", b"{}")).body == b"data: 1\n\n" * 20

    case(run, stall_s=1.0)


def test_the_first_event_has_a_time_of_its_own() -> None:
    async def run(proxy: Proxy) -> None:
        proxy.engine.script = headed
        answer = await ask(proxy.port, b"POST", b"/", b"{}")
        assert (answer.status, answer.body) == (502, b"stalled")  # nothing had been sent, so another answer could be

    case(run, first_data_s=0.4)


def test_a_prefill_longer_than_a_stall_is_none() -> None:
    async def run(proxy: Proxy) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.write(STREAM)
            await asyncio.sleep(1.2)
            writer.write(b"9\r\ndata: 1\n\n\r\n0\r\n\r\n")

        proxy.engine.script = script
        assert (await ask(proxy.port, b"POST", b"/", b"{}")).body == b"data: 1\n\n"

    case(run, stall_s=0.3)


def test_an_engine_that_never_answers() -> None:
    """production-stack#749: one hung engine blocks all."""

    async def run(proxy: Proxy) -> None:
        proxy.engine.script = silent
        assert (await ask(proxy.port)).status == 502
        [error] = proxy.outcomes
        assert isinstance(error, UpstreamError) and (error.kind, error.sent) == ("timeout", True)
        await until(lambda: not proxy.engine.open)

    case(run, timeouts=Timeouts(first_byte_s=0.3))


def test_an_idle_connection_to_an_engine_is_closed_before_the_engine_does() -> None:
    async def run(proxy: Proxy) -> None:
        await ask(proxy.port)
        assert proxy.upstream.connections == 1
        await until(lambda: proxy.upstream.connections == 0)
        await ask(proxy.port)
        assert proxy.engine.accepted == 2

    case(run, timeouts=Timeouts(idle_s=0.2))


@pytest.mark.parametrize("pieces", [20, 2000])
def test_a_slow_client_holds_its_engine_back_and_nothing_is_lost(pieces: int) -> None:
    """Memory of the router is bounded by a reader that does not read; the stall of the engine is not its own."""
    event = b"data: " + b"x" * 40_000 + b"\n\n"

    async def run(proxy: Proxy) -> None:
        written = 0

        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            nonlocal written
            writer.write(STREAM)
            for _ in range(pieces):
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
                written += 1
            writer.write(b"0\r\n\r\n")

        proxy.engine.script = script
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, limit=1 << 16)
        writer.write(request(b"POST", b"/", b"{}"))
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.8)  # longer than a stall
        relayed = sum(map(len, proxy.data))
        if pieces == 2000:
            assert relayed < 24 << 20 and written < pieces
        answer = await asyncio.wait_for(read_answer(reader), 2 * WAIT_S)
        assert answer.body == event * pieces
        writer.close()
        await until(lambda: proxy.outcomes == ["complete"])

    case(run, stall_s=0.5)


def test_a_client_that_never_reads_is_left() -> None:
    async def run(proxy: Proxy) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.write(STREAM)
            while True:
                writer.write(b"186a0\r\n" + b"x" * 100_000 + b"\r\n")
                await writer.drain()

        proxy.engine.script = script
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, limit=1 << 16)
        writer.write(request(b"POST", b"/", b"{}"))
        await until(lambda: proxy.outcomes == ["client_gone"] and not proxy.engine.open)
        writer.close()

    case(run, limits=Limits(write_stall_s=0.5))


def test_a_client_that_reads_slowly_is_not_left() -> None:
    """It never takes so much that the engine may go on, but it takes."""

    async def run(proxy: Proxy) -> None:
        async def handler(exchange: Exchange) -> None:
            exchange.start(200, [])
            exchange.write(b"x" * (16 << 20))
            await exchange.drain()
            exchange.end()

        proxy.server.handler = handler
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", proxy.port))
        await loop.sock_sendall(client, request())
        whole = 0
        begun = loop.time()
        while loop.time() < begun + 2.5:  # several times what one may take without reading
            whole += len(await loop.sock_recv(client, 1 << 18))
            await asyncio.sleep(0.1)
        assert whole < 14 << 20
        while whole < 16 << 20:
            data = await asyncio.wait_for(loop.sock_recv(client, 1 << 20), WAIT_S)
            assert data
            whole += len(data)
        client.close()

    case(run, limits=Limits(write_stall_s=0.5))


def test_a_cancelled_wait_closes_no_connection_that_is_another_s() -> None:
    """Its answer was whole as it was cancelled: the connection is in the pool, or at work again."""

    async def run(proxy: Proxy) -> None:
        upstream = proxy.upstream
        await (await upstream.send(b"GET", b"/1", [], b"")).read(100)
        [connection] = upstream._open
        proxy.engine.script = silent
        waiting = asyncio.create_task(upstream.send(b"GET", b"/2", [], b""))
        await until(lambda: len(proxy.engine.requests) == 2)
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert connection in upstream._idle and not connection._closed

    case(run)


BROKEN = {
    "not HTTP": b"hello\r\n\r\n",
    "a status that is none": b"HTTP/1.1 abc\r\n\r\n",
    "both lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
    "a change nobody asked for": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 60_000,
    "hints without end": b"HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n" * 20_000,
    "a bad chunk": STREAM + b"zz\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_engine_that_sends_something_else(name: str) -> None:
    async def run(proxy: Proxy) -> None:
        proxy.engine.script = says(BROKEN[name])
        assert (await ask(proxy.port)).status == 502
        [outcome] = proxy.outcomes
        assert outcome == "upstream_lost" or (isinstance(outcome, UpstreamError) and outcome.kind == "protocol")
        proxy.engine.script = echo
        assert (await ask(proxy.port)).status == 200

    case(run)


def test_headers_without_end_are_not_kept() -> None:
    """Whoever keeps the error, as the tasks that it went through do, keeps the connection."""

    async def run(proxy: Proxy) -> None:
        made: list[EngineConnection] = []

        def connection() -> EngineConnection:
            made.append(EngineConnection(proxy.upstream))
            return made[0]

        proxy.engine.script = says(BROKEN["headers without end"])
        await proxy.upstream.open(connection)
        with pytest.raises(UpstreamError, match="bytes of headers"):
            await made[0].send(request(), b"", False, None)
        await until(lambda: proxy.upstream.connections == 0)
        assert not made[0]._headers

    case(run)


def test_what_an_engine_sends_behind_its_answer_reaches_nobody() -> None:
    async def run(proxy: Proxy) -> None:
        spill = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        for answer in (
            b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ngood",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ngood\r\n0\r\nx-trailer: 1\r\n\r\n",
        ):
            proxy.engine.script = says(answer + spill)
            assert (await ask(proxy.port)).body == b"good"
            proxy.engine.script = says(answer, spill)
            assert (await ask(proxy.port)).body == b"good"
            proxy.engine.script = echo
            answered = await ask(proxy.port)
            assert (answered.body, answered.header(b"x-trailer")) == (b"GET / ", None)

    case(run)


@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
def test_an_engine_that_answers_before_it_has_the_request(close: bytes) -> None:
    """What it has not read would be in the way of the next request, or stay here as long as the engine likes."""

    async def run(proxy: Proxy) -> None:
        enough = asyncio.Event()

        async def refuse(reader: Reader, writer: Writer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 X\r\n" + close + b"content-length: 2\r\n\r\nno")
            await enough.wait()  # and reads no more
            writer.close()

        engine = await asyncio.start_server(refuse, "127.0.0.1", 0, limit=1 << 10)
        async with engine:
            upstream = Upstream(f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}")
            for _ in range(2):
                response = await upstream.send(b"POST", b"/", [], b"x" * (32 << 20))
                assert (response.status, await response.read(2)) == (413, b"no")
                await until(lambda: upstream.connections == 0)
            enough.set()

    case(run)


def test_trailers_of_one_answer_are_no_headers_of_the_next() -> None:
    async def run(proxy: Proxy) -> None:
        proxy.engine.script = says(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ngood\r\n0\r\nx-trailer: 1\r\n\r\n"
        )
        for _ in range(2):
            answer = await ask(proxy.port)
            assert (answer.body, answer.headers) == (b"good", [(b"transfer-encoding", b"chunked")])
        assert proxy.engine.accepted == 1

    case(run)


def test_pieces_of_an_answer() -> None:
    """For what is transformed on its way: iteration, whole reads, and their limits."""

    async def run(proxy: Proxy) -> None:
        upstream = proxy.upstream
        events = [b"data: %d\n\n" % number for number in range(100)]
        proxy.engine.script = chunked(*events)
        response = await upstream.send(b"POST", b"/", [], b"")
        assert b"".join([piece async for piece in response]) == b"".join(events)
        response = await upstream.send(b"POST", b"/", [], b"")
        assert await response.read(1 << 20) == b"".join(events)
        assert upstream.connections == 1
        response = await upstream.send(b"POST", b"/", [], b"")
        with pytest.raises(UpstreamError, match="more than 50 bytes"):
            await response.read(50)
        response = await upstream.send(b"POST", b"/", [], b"")
        async for _ in response:
            break
        response.cancel()
        await until(lambda: upstream.connections == 0)
        proxy.engine.script = stalling
        response = await upstream.send(b"POST", b"/", [], b"")
        with pytest.raises(UpstreamError, match="stopped sending"):
            async for piece in response.pieces(stall_s=0.3):
                assert piece == b"data: 1\n\n"
        proxy.engine.script = chunked(*events, end=False)
        response = await upstream.send(b"POST", b"/", [], b"")
        with pytest.raises(UpstreamError, match="stopped sending"):
            async for piece in response.pieces(stall_s=0.3):
                assert piece.startswith(b"data: ")

    case(run)


def test_iteration_is_read_no_faster_than_it_is_used() -> None:
    async def run(proxy: Proxy) -> None:
        written = 0

        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            nonlocal written
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
            for _ in range(64):
                writer.write(b"x" * (1 << 20))
                await writer.drain()
                written += 1

        proxy.engine.script = script
        response = await proxy.upstream.send(b"POST", b"/", [], b"")
        size = 0
        async for piece in response:
            if not size:
                before = -1
                while before != written:
                    before = written
                    await asyncio.sleep(0.3)
                assert written < 24
            size += len(piece)
        assert size == 64 << 20

    case(run)


def test_a_handler_that_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def run(proxy: Proxy) -> None:
        async def handler(exchange: Exchange) -> None:
            if exchange.path == b"/nothing":
                return
            if exchange.path == b"/half":
                exchange.start(200, [])
                exchange.write(b"half")
            if exchange.path == b"/twice":
                exchange.respond(200, [], b"once")
                exchange.respond(200, [], b"twice")
            raise ValueError("no")

        proxy.server.handler = handler
        assert (await ask(proxy.port, path=b"/raises")).status == 500
        assert (await ask(proxy.port, path=b"/nothing")).status == 500
        assert (await ask(proxy.port, path=b"/twice")).body == b"once"
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await ask(proxy.port, path=b"/half")

    with caplog.at_level(logging.CRITICAL):
        case(run)


def test_an_answer_is_cut_behind_what_was_written() -> None:
    """What a client sees of a stream that cannot go on: its error event, and no end, even where it is slow to read."""

    async def run(proxy: Proxy) -> None:
        async def handler(exchange: Exchange) -> None:
            exchange.start(200, [])
            exchange.write(b"x" * (8 << 20))
            exchange.write(b"error")
            exchange.cut()
            exchange.write(b"nothing more")

        proxy.server.handler = handler
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, limit=1 << 16)
        writer.write(request())
        await until(lambda: proxy.server.connections and not proxy.server.tasks)
        whole = await asyncio.wait_for(reader.read(-1), WAIT_S)
        assert whole.endswith(b"5\r\nerror\r\n") and len(whole) > 8 << 20
        writer.close()

    case(run)


def test_draining_lets_answers_finish_and_takes_no_more() -> None:
    """production-stack#420: scale-down kills what is under way."""

    async def run(proxy: Proxy) -> None:
        gate = asyncio.Event()

        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            await says(STREAM + b"9\r\ndata: 1\n\n\r\n")(engine, seen, reader, writer)
            await gate.wait()
            writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

        proxy.engine.script = script
        idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        busy_reader, busy_writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        busy_writer.write(request(b"POST", b"/", b"{}"))
        await until(lambda: proxy.data)
        draining = asyncio.create_task(proxy.server.drain(WAIT_S))
        assert await asyncio.wait_for(idle_reader.read(-1), WAIT_S) == b""
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", proxy.port)
        gate.set()
        assert (await asyncio.wait_for(read_answer(busy_reader), WAIT_S)).body == b"data: 1\n\ndata: 2\n\n"
        assert await asyncio.wait_for(busy_reader.read(-1), WAIT_S) == b""
        assert await draining == 0
        for writer in (idle_writer, busy_writer):
            writer.close()

    case(run)


def test_draining_ends_with_its_time() -> None:
    async def run(proxy: Proxy) -> None:
        proxy.engine.script = stalling
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request(b"POST", b"/", b"{}"))
        await until(lambda: proxy.data)
        assert await proxy.server.drain(0.1) == 1
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(read_answer(reader), WAIT_S)
        await until(lambda: not proxy.engine.open)
        writer.close()

    case(run)
