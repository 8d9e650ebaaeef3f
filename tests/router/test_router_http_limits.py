"""What clients may take of memory and time: each limit with its status, and memory after large things."""

import asyncio
import gzip
import os
import zlib

import pytest
from router_http_case import (
    WAIT_S,
    Engine,
    Headers,
    Proxy,
    Reader,
    Seen,
    Writer,
    ask,
    case,
    read_answer,
    request,
    until,
)

from deepinfer_router.errors import Refusal
from deepinfer_router.http_config import Limits
from deepinfer_router.server_connection import REFUSED

POST = b"POST / HTTP/1.1\r\nhost: a\r\n"


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def refused(proxy: Proxy, data: bytes, status: int, code: bytes, retry_after: bytes | None = None) -> None:
    before = REFUSED.labels(code.decode()).value
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(data)
    answer = await asyncio.wait_for(read_answer(reader), WAIT_S)
    assert (answer.status, answer.header(b"connection")) == (status, b"close")
    assert answer.header(b"retry-after") == retry_after
    assert REFUSED.labels(code.decode()).value == before + 1
    assert b'"code":"%b"' % code in answer.body
    assert await asyncio.wait_for(reader.read(-1), WAIT_S) == b""
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"x: " + b"y" * 5000 + b"\r\n\r\n",
        b"x: " + b"y" * 5000,  # without an end
        b"".join(b"x%d: y\r\n" % number for number in range(51)) + b"\r\n",
    ],
)
def test_header_bombs(head: bytes) -> None:
    async def run(proxy: Proxy) -> None:
        code = b"too_many_headers" if head.startswith(b"x0") else b"headers_too_large"
        await refused(proxy, POST + head, 431, code)
        long_path = b"GET /" + b"x" * 5000
        await refused(proxy, long_path, 431, b"headers_too_large")
        assert proxy.engine.requests == []

    case(run, limits=Limits(max_header_bytes=4096, max_headers=50))


def test_a_body_that_is_too_large_is_refused_before_it_comes() -> None:
    async def run(proxy: Proxy) -> None:
        await refused(proxy, POST + b"content-length: 1001\r\nexpect: 100-continue\r\n\r\n", 413, b"body_too_large")
        await refused(proxy, POST + b"content-length: 1001\r\n\r\n" + b"x" * 1001, 413, b"body_too_large")
        assert (await ask(proxy.port, b"POST", b"/", b"x" * 1000)).status == 200

    case(run, limits=Limits(max_body_bytes=1000))


def test_a_body_of_unknown_length_is_refused_while_it_comes() -> None:
    async def run(proxy: Proxy) -> None:
        head = POST + b"transfer-encoding: chunked\r\n\r\n"
        await refused(proxy, head + b"3e9\r\n" + b"x" * 1001, 413, b"body_too_large")
        await refused(proxy, head + b"1\r\nx\r\n" * 1001, 413, b"body_too_large")
        await refused(proxy, head + b"0\r\n" + b"x: %b\r\n" % (b"y" * 70_000), 400, b"bad_request")
        assert proxy.engine.requests == []

    case(run, limits=Limits(max_body_bytes=1000))


def test_a_client_that_goes_on_sending_reads_why_it_was_refused() -> None:
    """A connection closed with unread bytes is reset, and the answer with it."""

    async def run(proxy: Proxy) -> None:
        await refused(proxy, POST + b"content-length: 5000000\r\n\r\n" + b"x" * 5_000_000, 413, b"body_too_large")

    case(run, limits=Limits(max_body_bytes=1000))


def test_bodies_together_are_bounded() -> None:
    async def run(proxy: Proxy) -> None:
        half = POST + b"content-length: 1000000\r\n\r\n" + b"x" * 600_000
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(half)
        await until(lambda: proxy.server.buffered_bytes == 600_000)
        await refused(proxy, half, 503, b"too_many_bytes", retry_after=b"1")
        writer.write(b"x" * 400_000)
        assert (await asyncio.wait_for(read_answer(reader), WAIT_S)).status == 200
        await until(lambda: proxy.server.buffered_bytes == 0)
        assert (await ask(proxy.port, b"POST", b"/", b"x" * 900_000)).status == 200
        writer.close()

    case(run, limits=Limits(max_buffered_bytes=1_000_000))


def test_slow_loris() -> None:
    async def run(proxy: Proxy) -> None:
        connections = [await asyncio.open_connection("127.0.0.1", proxy.port) for _ in range(3)]
        (silent, _), (heads, head_writer), (bodies, body_writer) = connections
        body_writer.write(POST + b"content-length: 100\r\n\r\n")
        trickle = asyncio.create_task(_trickle(head_writer, body_writer))
        head = await asyncio.wait_for(read_answer(heads), WAIT_S)
        body = await asyncio.wait_for(read_answer(bodies), WAIT_S)
        assert (head.status, b"head_timeout" in head.body) == (408, True)
        assert (body.status, b"body_timeout" in body.body) == (408, True)
        assert await asyncio.wait_for(silent.read(-1), WAIT_S) == b""  # and a connection that never sends is closed
        trickle.cancel()
        for _, writer in connections:
            writer.close()

    case(run, limits=Limits(head_timeout_s=0.5, body_timeout_s=0.5))


async def _trickle(head: Writer, body: Writer) -> None:
    head.write(b"GET / HTTP/1.1\r\n")
    while True:
        head.write(b"x")
        body.write(b"x")
        await asyncio.sleep(0.05)


def test_an_idle_connection_is_closed() -> None:
    async def run(proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request())
        assert (await asyncio.wait_for(read_answer(reader), WAIT_S)).status == 200
        assert await asyncio.wait_for(reader.read(-1), WAIT_S) == b""
        writer.close()

    case(run, limits=Limits(keep_alive_s=0.3))


def test_connections_beyond_the_limit_are_closed() -> None:
    async def run(proxy: Proxy) -> None:
        kept = [await asyncio.open_connection("127.0.0.1", proxy.port) for _ in range(2)]
        await until(lambda: len(proxy.server.connections) == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), WAIT_S)
        kept[0][1].write(request())
        assert (await asyncio.wait_for(read_answer(kept[0][0]), WAIT_S)).status == 200
        for _, other in (*kept, (reader, writer)):
            other.close()

    case(run, limits=Limits(max_connections=2))


@pytest.mark.parametrize("chunked", [False, True])
def test_100_mb_of_body_go_through_again_and_again(chunked: bool) -> None:
    size = 100 << 20
    piece = b"x" * (1 << 20)

    async def run(proxy: Proxy) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n%9d" % len(seen.body))
            seen.body = b""

        proxy.engine.script = script
        after = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % size
            writer.write(POST + framing + b"\r\n\r\n")
            for _ in range(100):
                writer.write(b"100000\r\n%b\r\n" % piece if chunked else piece)
                await writer.drain()
            if chunked:
                writer.write(b"0\r\n\r\n")
            assert (await asyncio.wait_for(read_answer(reader), 4 * WAIT_S)).body == b"%9d" % size
            writer.close()
            await until(lambda: not proxy.server.connections and proxy.server.buffered_bytes == 0)
            after.append(resident_bytes())
        assert after[-1] - after[1] < size // 2

    case(run, limits=Limits(max_body_bytes=size))


def test_100_mb_of_answer_go_through_in_little_memory() -> None:
    size = 100 << 20

    async def run(proxy: Proxy) -> None:
        most = 0

        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            nonlocal most
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
            for _ in range(size >> 16):
                writer.write(b"y" * (1 << 16))
                await writer.drain()
                most = max(most, resident_bytes())

        proxy.engine.script = script
        before = resident_bytes()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request())
        await reader.readuntil(b"\r\n\r\n")
        total = 0
        while total < size:
            data = await asyncio.wait_for(reader.read(1 << 16), WAIT_S)
            assert data == b"y" * len(data) != b""
            total += len(data)
            proxy.data.clear()
        assert most - before < 32 << 20
        writer.close()

    case(run)


@pytest.mark.parametrize(
    ("coding", "data"),
    [(b"gzip", gzip.compress(b"plain" * 1000)), (b"deflate", zlib.compress(b"plain" * 1000))],
)
def test_a_compressed_request_reaches_the_handler_plain(coding: bytes, data: bytes) -> None:
    async def run(proxy: Proxy) -> None:
        answer = await ask(proxy.port, b"POST", b"/", data, [(b"content-encoding", coding)])
        assert answer.body == b"POST / " + b"plain" * 1000
        [seen] = proxy.engine.requests
        names = dict(seen.headers)
        assert b"content-encoding" not in names and names[b"content-length"] == b"5000"

    case(run)


@pytest.mark.parametrize(
    ("coding", "data", "status"),
    [
        (b"gzip", gzip.compress(b"x" * 100_001), 413),
        (b"gzip", b"not gzip", 400),
        (b"gzip", gzip.compress(b"x" * 1000)[:-10], 400),
        (b"gzip", gzip.compress(b"x") + b"more", 400),
        (b"br", b"x", 415),
        (b"gzip, gzip", b"x", 415),
    ],
)
def test_compressed_requests_that_are_refused(coding: bytes, data: bytes, status: int) -> None:
    async def run(proxy: Proxy) -> None:
        answer = await ask(proxy.port, b"POST", b"/", data, [(b"content-encoding", coding)])
        assert answer.status == status and proxy.engine.requests == []

    case(run, limits=Limits(max_body_bytes=100_000))


def test_decompressed_bodies_count() -> None:
    """A thousandth of their bytes came."""

    async def run(proxy: Proxy) -> None:
        body = gzip.compress(b"x" * 1_000_000)
        gone = asyncio.Event()

        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            await gone.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        proxy.engine.script = script
        coding = [(b"content-encoding", b"gzip")]
        waiting = [asyncio.create_task(ask(proxy.port, b"POST", b"/", body, coding)) for _ in range(2)]
        await until(lambda: len(proxy.engine.requests) == 2)
        assert proxy.server.buffered_bytes == 2_000_000
        refused = await ask(proxy.port, b"POST", b"/", body, coding)
        assert refused.status == 503 and b"too_many_bytes" in refused.body
        await until(lambda: proxy.server.buffered_bytes == 2_000_000)
        gone.set()
        assert [(await each).status for each in waiting] == [200, 200]
        await until(lambda: proxy.server.buffered_bytes == 0)
        assert (await ask(proxy.port, b"POST", b"/", body, coding)).status == 200

    case(run, limits=Limits(max_buffered_bytes=2_500_000))


def test_for_whom_the_gate_refuses_no_body_is_waited_for_or_decompressed() -> None:
    async def run(proxy: Proxy) -> None:
        def gate(headers: Headers) -> None:
            if (b"x-api-key", b"right") not in headers:
                raise Refusal(401, "invalid_api_key", "no")

        proxy.server.gate = gate
        right = [(b"x-api-key", b"right")]
        for framing in (
            b"content-length: 5",
            b"transfer-encoding: chunked",
            b"content-length: 5\r\nexpect: 100-continue",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(POST + framing + b"\r\n\r\n")
            answer = await asyncio.wait_for(read_answer(reader), WAIT_S)
            assert (answer.status, answer.header(b"connection")) == (401, b"close")
            writer.close()
        body = gzip.compress(b"x")
        coding = (b"content-encoding", b"gzip")
        assert (await ask(proxy.port, b"POST", b"/", body, [coding])).status == 401
        assert proxy.engine.requests == []
        assert (await ask(proxy.port, b"POST", b"/", body, [coding, *right])).body == b"POST / x"
        big = b"x" * 3_000_000
        assert (await ask(proxy.port, b"POST", b"/", big, right)).body == b"POST / " + big

    case(run)


@pytest.mark.parametrize("size", [6_000, 32_768, 65_536, 131_072, 4_200_000])
def test_long_prompts_are_no_limit(size: int) -> None:
    """GAIE#854, GAIE#2115, ai-gateway#827, ai-gateway#1209, cluster-forge#832: 413 or 500 at these sizes."""

    async def run(proxy: Proxy) -> None:
        body = os.urandom(size)
        assert (await ask(proxy.port, b"POST", b"/", body)).body == b"POST / " + body

    case(run)
