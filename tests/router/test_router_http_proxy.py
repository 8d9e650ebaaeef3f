"""Requests through the whole data path: a client's socket, the server, a handler that relays, an engine's socket."""

import asyncio
import gc
import gzip
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    until,
)

EVENTS = [b"data: %d\n\n" % number for number in range(5)]
DONE = b"data: [DONE]\n\n"


def test_a_request_and_its_answer() -> None:
    async def run(proxy: Proxy) -> None:
        answer = await ask(proxy.port, b"POST", b"/v1/x?y=1", b"hello", [(b"X-Thing", b"7")])
        assert (answer.status, answer.body) == (200, b"POST /v1/x?y=1 hello")
        assert answer.headers == [(b"content-type", b"text/plain"), (b"content-length", b"20")]
        [seen] = proxy.engine.requests
        assert seen.headers == [
            (b"host", b"127.0.0.1:%d" % proxy.engine.port),
            (b"x-thing", b"7"),
            (b"content-length", b"5"),
        ]
        assert proxy.outcomes == ["complete"]

    case(run)


def test_connections_of_both_sides_are_kept() -> None:
    async def run(proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for number in range(5):
            writer.write(request(b"POST", b"/", b"%d" % number))
            assert (await read_answer(reader)).body == b"POST / %d" % number
        assert proxy.engine.accepted == 1
        writer.close()

    case(run)


def test_a_stream_is_handed_on_event_by_event() -> None:
    async def run(proxy: Proxy) -> None:
        proxy.engine.script = chunked(*EVENTS, DONE)
        answer = await ask(proxy.port, b"POST", b"/", b"{}")
        assert answer.body == b"".join(EVENTS) + DONE == b"".join(proxy.data)
        assert answer.headers == [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")]

    case(run)


def test_a_first_event_is_not_held_for_the_second() -> None:
    """HAProxy's default, and sglang-router 0.3.2 by 33 ms: tokens that wait for more before they are sent."""

    async def run(proxy: Proxy) -> None:
        gate = asyncio.Event()

        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            await chunked(EVENTS[0], end=False)(engine, seen, reader, writer)
            await gate.wait()
            await says(b"3\r\n:\n\n\r\n0\r\n\r\n")(engine, seen, reader, writer)

        proxy.engine.script = script
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request(b"POST", b"/", b"{}"))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert await asyncio.wait_for(reader.readexactly(14), WAIT_S) == b"9\r\n" + EVENTS[0] + b"\r\n"
        gate.set()
        assert await asyncio.wait_for(reader.readexactly(13), WAIT_S) == b"3\r\n:\n\n\r\n0\r\n\r\n"
        writer.close()

    case(run)


def test_streams_split_at_every_byte() -> None:
    """aibrix#2653: events cut by TCP. What the client has is whole events at any time."""
    whole = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in [*EVENTS, b": c\n\n", DONE]) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    async def run(proxy: Proxy) -> None:
        for cut in range(len(head), len(head + whole)):
            proxy.engine.script = says((head + whole)[:cut], (head + whole)[cut:])
            proxy.data.clear()
            answer = await ask(proxy.port, b"POST", b"/", b"{}")
            assert answer.body == b"".join(EVENTS) + b": c\n\n" + DONE
            assert all(piece.endswith(b"\n\n") for piece in proxy.data)

    case(run)


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body(status: int) -> None:
    async def run(proxy: Proxy) -> None:
        proxy.engine.script = says(b"HTTP/1.1 %d X\r\netag: 1\r\n\r\n" % status)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for _ in range(2):
            writer.write(request())
            answer = await asyncio.wait_for(read_answer(reader), WAIT_S)
            assert (answer.status, answer.headers) == (status, [(b"etag", b"1")])
        writer.close()

    case(run)


def test_head_has_the_length_and_no_body() -> None:
    async def run(proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request(b"HEAD"))
        assert (await asyncio.wait_for(read_answer(reader, b"HEAD"), WAIT_S)).header(b"content-length") == b"7"
        writer.write(request(b"GET"))
        assert (await asyncio.wait_for(read_answer(reader), WAIT_S)).body == b"GET / "
        writer.close()

    case(run)


def test_gzip_stays_gzip() -> None:
    """sglang-router 0.3.2 strips content-encoding and relays the compressed bytes."""
    body = gzip.compress(b"x" * 1000)

    async def run(proxy: Proxy) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body)
        proxy.engine.script = says(head + body)
        answer = await ask(proxy.port)
        assert (answer.header(b"content-encoding"), answer.body) == (b"gzip", body)

    case(run)


def test_gzip_of_a_stream_stays_gzip() -> None:
    body = gzip.compress(b"data: 1\n\n")

    async def run(proxy: Proxy) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"
        proxy.engine.script = says(
            head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        )
        answer = await ask(proxy.port)
        assert (answer.header(b"content-encoding"), answer.body) == (b"gzip", body)

    case(run)


def test_interim_answers_of_an_engine_are_skipped() -> None:
    async def run(proxy: Proxy) -> None:
        proxy.engine.script = says(
            b"HTTP/1.1 100 Continue\r\n\r\n",
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        )
        for _ in range(2):
            answer = await ask(proxy.port)
            assert (answer.status, answer.headers, answer.body) == (200, [(b"content-length", b"2")], b"ok")
        assert proxy.engine.accepted == 1

    case(run)


def test_an_answer_that_ends_with_the_connection() -> None:
    async def run(proxy: Proxy) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\nall of it")
            writer.close()

        proxy.engine.script = script
        answer = await ask(proxy.port)
        assert (answer.body, answer.framed[-5:]) == (b"all of it", b"0\r\n\r\n")

    case(run)


def test_hop_by_hop_headers_end_here() -> None:
    async def run(proxy: Proxy) -> None:
        proxy.engine.script = says(
            b"HTTP/1.1 200 OK\r\nconnection: x-mine\r\nx-mine: 1\r\nkeep-alive: timeout=5\r\nx-yours: 2\r\n"
            b"content-length: 0\r\n\r\n"
        )
        answer = await ask(proxy.port, headers=[(b"te", b"trailers"), (b"proxy-connection", b"x"), (b"a", b"b")])
        assert answer.headers == [(b"x-yours", b"2"), (b"content-length", b"0")]
        assert [name for name, _ in proxy.engine.requests[0].headers] == [b"host", b"a"]

    case(run)


def test_the_engine_is_lost_in_a_stream() -> None:
    """An RST or FIN in mid-stream, which other routers pass on as the end of an answer with status 200."""

    async def run(proxy: Proxy) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            half = b"data: {"
            await chunked(*EVENTS, half, end=False)(engine, seen, reader, writer)
            await until(lambda: len(b"".join(proxy.data)) == len(b"".join(EVENTS)))
            writer.transport.abort() if seen.path == b"/rst" else writer.close()

        proxy.engine.script = script
        for path in (b"/rst", b"/fin"):
            proxy.data.clear()
            with pytest.raises(asyncio.IncompleteReadError):  # the handler aborts what it does not end
                await ask(proxy.port, b"POST", path, b"{}")
            assert b"".join(proxy.data) == b"".join(EVENTS)
        assert proxy.outcomes == ["upstream_lost"] * 2

    case(run)


def test_an_answer_of_known_length_that_is_cut_short_was_never_begun() -> None:
    async def run(proxy: Proxy) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            await says(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", b"half")(engine, seen, reader, writer)
            writer.close()

        proxy.engine.script = script
        answer = await ask(proxy.port)
        assert (answer.status, answer.body) == (502, b"upstream_lost")

    case(run)


def test_a_connection_that_the_engine_was_closing_is_replaced_once() -> None:
    """aiohttp#9138: a server disconnects a kept connection as the next request is sent."""

    async def run(proxy: Proxy) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            if len(engine.requests) == 2:
                writer.close()
            else:
                await echo(engine, seen, reader, writer)

        proxy.engine.script = script
        assert (await ask(proxy.port)).status == 200
        assert (await ask(proxy.port)).status == 200
        assert (len(proxy.engine.requests), proxy.engine.accepted) == (3, 2)

    case(run)


def test_a_fresh_connection_that_closes_is_not_tried_again() -> None:
    async def run(proxy: Proxy) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.close()

        proxy.engine.script = script
        assert (await ask(proxy.port)).status == 502
        assert len(proxy.engine.requests) == 1
        [error] = proxy.outcomes
        assert not isinstance(error, str) and (error.kind, error.sent) == ("reset", True)

    case(run)


def test_an_engine_that_is_not_there() -> None:
    async def run(proxy: Proxy) -> None:
        await proxy.engine.stop()
        assert (await ask(proxy.port)).status == 502
        [error] = proxy.outcomes
        assert not isinstance(error, str) and (error.kind, error.sent) == ("connect", False)

    case(run)


def test_requests_leave_no_cycles() -> None:
    """Else bodies stay until the garbage collector comes by, and it comes often."""

    async def run(proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)

        async def some(count: int) -> None:
            for _ in range(count):
                for script in (echo, chunked(*EVENTS)):
                    proxy.engine.script = script
                    writer.write(request(b"POST", b"/", b"x"))
                    await read_answer(reader)
                writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n")
                await read_answer(reader)

        await some(3)
        gc.collect()
        gc.disable()
        try:
            await some(100)
            assert gc.collect() < 100
        finally:
            gc.enable()
        writer.close()

    case(run)


@settings(max_examples=60)
@given(
    st.lists(st.binary(min_size=1, max_size=30) | st.sampled_from([*EVENTS, b"\r\n\r\n", b"\n\n"]), max_size=8),
    st.lists(st.integers(0, 400), max_size=6),
    st.sampled_from([b"text/event-stream", b"application/json"]),
    st.sampled_from([b"", b";name=value", b';name="quoted value"']),
    st.sampled_from([b"", b"x-trailer: 1\r\n"]),
)
def test_chunked_answers_of_any_shape_over_any_boundary(
    pieces: list[bytes], cuts: list[int], kind: bytes, extension: bytes, trailer: bytes
) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind
    chunks = b"".join(b"%X%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    stream = head + chunks + b"0\r\n" + trailer + b"\r\n"
    bounds = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})

    async def run(proxy: Proxy) -> None:
        proxy.engine.script = says(*[stream[start:end] for start, end in zip(bounds, bounds[1:], strict=False)])
        for _ in range(2):
            answer = await ask(proxy.port, b"POST", b"/", b"{}")
            assert answer.body == b"".join(pieces)
        assert b"".join(proxy.data) == 2 * b"".join(pieces)
        assert proxy.engine.accepted == 1 and proxy.outcomes == ["complete"] * 2

    case(run)


@settings(max_examples=60)
@given(
    st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]),
    st.binary(max_size=100),
)
def test_answers_of_any_bytes_leave_the_router_standing(head: bytes, data: bytes) -> None:
    async def run(proxy: Proxy) -> None:
        async def script(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
            writer.write(head + data)
            writer.close()

        proxy.engine.script = script
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # of an answer that had begun
            await ask(proxy.port)
        proxy.engine.script = echo
        assert (await ask(proxy.port)).body == b"GET / "

    case(run)
