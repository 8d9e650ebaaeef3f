"""Reading requests: any bytes, any cuts, nothing ambiguous."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_http_case import WAIT_S, Proxy, Reader, Writer, ask, case, read_answer, request

from deepinfer_router.errors import Refusal
from deepinfer_router.exchange import Exchange
from deepinfer_router.http_config import Limits
from deepinfer_router.http_request import END, Request

POST = b"POST / HTTP/1.1\r\nhost: a\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
BODIES = st.lists(st.binary(min_size=1, max_size=40) | st.just(b"\r\n\r\n") | st.just(b"0\r\n\r\n"), max_size=6)
CUTS = st.lists(st.integers(0, 300), max_size=6)


def chunks(pieces: list[bytes], trailers: bytes = b"") -> bytes:
    return b"".join(b"%X\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailers + b"\r\n"


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    bounds = sorted({0, len(stream), *(at for at in cuts if at < len(stream))})
    return [stream[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def read(head: bytes, pieces: list[bytes]) -> tuple[Request, bytes | None]:
    """A request fed piece by piece, and what came behind it."""
    reader = Request(head)
    for index, piece in enumerate(pieces):
        rest = reader.feed(piece)
        if rest is not None:
            return reader, rest + b"".join(pieces[index + 1 :])
    return reader, None


@given(BODIES, CUTS, st.sampled_from([b"", b"GET / HTTP/1.1\r\n", b"\r\n\r\n", b"0\r\n\r\n"]))
def test_chunks_over_any_boundary(pieces: list[bytes], cuts: list[int], behind: bytes) -> None:
    for trailers in (b"", b"x-trailer: 1\r\nhost: evil\r\n"):
        reader, rest = read(CHUNKED, cut(chunks(pieces, trailers) + behind, cuts))
        assert reader.complete and rest == behind
        assert reader.body() == b"".join(pieces)
        assert reader.headers == [(b"host", b"a"), (b"transfer-encoding", b"chunked")]


@given(BODIES, CUTS)
def test_a_body_of_known_length_over_any_boundary(pieces: list[bytes], cuts: list[int]) -> None:
    body = b"".join(pieces) or b"x"
    head = POST + b"content-length: %d\r\n\r\n" % len(body)
    reader, rest = read(head, cut(body + b"GET /", cuts))
    assert reader.body() == body and rest == b"GET /"


@given(st.binary(max_size=200))
def test_chunks_of_any_bytes(data: bytes) -> None:
    try:
        reader, rest = read(CHUNKED, [data])
    except Refusal as refusal:
        assert refusal.status == 400
        return
    assert (rest is not None) == reader.complete
    assert reader.size == sum(map(len, reader.pieces)) <= len(data)


@given(st.binary(max_size=200) | st.binary(max_size=40).map(lambda data: POST + data))
def test_heads_of_any_bytes(data: bytes) -> None:
    head = data.split(END)[0] + END
    try:
        reader = Request(head)
    except Refusal as refusal:
        assert refusal.status in (400, 501, 505)
        return
    assert reader.method and (reader.http_1_0 or (b"host") in reader.framing)


AMBIGUOUS = {
    "both lengths": b"content-length: 1\r\ntransfer-encoding: chunked",
    "two lengths": b"content-length: 1\r\ncontent-length: 2",
    "the same length twice": b"content-length: 1\r\ncontent-length: 1",
    "a list of lengths": b"content-length: 1, 1",
    "a length with a sign": b"content-length: +1",
    "a negative length": b"content-length: -1",
    "a hexadecimal length": b"content-length: 0x1",
    "a length beyond 64 bits": b"content-length: 99999999999999999999",
    "an empty length": b"content-length: ",
    "a folded line": b"x: 1\r\n folded: 2",
    "a folded coding": b"transfer-encoding:\r\n chunked",
    "bare LF": b"x: 1\ny: 2",
    "bare CR": b"x: 1\ry: 2",
    "NUL": b"x: 1\0",
    "a space before the colon": b"content-length : 1",
    "a line without a colon": b"content-length",
    "an empty name": b": 1",
    "two hosts": b"host: b",
    "two codings": b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
    "an unknown coding": b"transfer-encoding: xchunked",
    "chunked not last": b"transfer-encoding: chunked, gzip",
    "a coding in a list": b"transfer-encoding: gzip, chunked",
    "chunked with a tab": b"transfer-encoding: chunked\x0b",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_request_that_two_readers_could_read_differently_is_refused(name: str) -> None:
    async def run(proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(POST + AMBIGUOUS[name] + b"\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n")
        answer = await asyncio.wait_for(read_answer(reader), WAIT_S)
        assert answer.status in (400, 501) and answer.header(b"connection") == b"close"
        assert b"code" in answer.body
        assert await asyncio.wait_for(reader.read(-1), WAIT_S) == b""
        assert proxy.engine.requests == []
        writer.close()

    case(run)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET / HTTP/1.1\r\n", 400),  # no host
        (b"GET / HTTP/2.0\r\nhost: a\r\n", 505),
        (b"GET / HTTP/0.9\r\nhost: a\r\n", 505),
        (b"GET /\r\nhost: a\r\n", 505),
        (b"PRI * HTTP/2.0\r\n", 505),
        (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n", 400),
        (b"GET ftp://a/ HTTP/1.1\r\nhost: a\r\n", 400),
        (b"GARBAGE / HTTP/1.1\r\nhost: a\r\n", 400),
        (POST + b"expect: 200-ok\r\ncontent-length: 1\r\n", 417),
    ],
)
def test_what_is_not_spoken_here(line: bytes, status: int) -> None:
    async def run(proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(line + b"\r\n\r\n")
        assert (await asyncio.wait_for(read_answer(reader), WAIT_S)).status == status
        assert await asyncio.wait_for(reader.read(-1), WAIT_S) == b""
        writer.close()

    case(run)


def test_tls_to_a_plain_port_is_refused_at_once() -> None:
    async def run(proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert (await asyncio.wait_for(read_answer(reader), WAIT_S)).status == 400
        writer.close()

    case(run, limits=Limits(head_timeout_s=10 * WAIT_S))


def test_an_absolute_target_is_read_by_its_path() -> None:
    async def run(proxy: Proxy) -> None:
        for target, path in ((b"http://a:1/v1/x?y", b"/v1/x?y"), (b"http://a", b"/"), (b"HTTPS://a/", b"/")):
            assert (await ask(proxy.port, b"GET", target)).body == b"GET %b " % path

    case(run)


async def converse(proxy: Proxy, pieces: list[bytes], count: int) -> list[bytes]:
    """Send pieces, each as a segment of its own, and read `count` answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0)
    bodies = [(await asyncio.wait_for(read_answer(reader), WAIT_S)).body for _ in range(count)]
    writer.close()
    return bodies


def test_requests_split_at_every_byte() -> None:
    first = request(b"POST", b"/1", b"one")
    second = b"POST /2 HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + chunks([b"t", b"w\r\n\r\no"])
    stream = first + second + request(b"GET", b"/3")

    async def run(proxy: Proxy) -> None:
        for at in range(1, len(stream)):
            bodies = await converse(proxy, [stream[:at], stream[at:]], 3)
            assert bodies == [b"POST /1 one", b"POST /2 tw\r\n\r\no", b"GET /3 "]
        assert await converse(proxy, [stream[at : at + 1] for at in range(len(stream))], 3) == bodies

    case(run)


def test_answers_of_pipelined_requests_come_in_order_and_one_at_a_time() -> None:
    async def run(proxy: Proxy) -> None:
        busy = 0

        async def script(engine: object, seen: object, reader: Reader, writer: Writer) -> None:
            nonlocal busy
            busy += 1
            assert busy == 1
            await asyncio.sleep(0.001)
            path = proxy.engine.requests[-1].path
            busy -= 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(path), path))

        proxy.engine.script = script
        count = 300
        bodies = await converse(proxy, [b"".join(request(b"GET", b"/%d" % number) for number in range(count))], count)
        assert bodies == [b"/%d" % number for number in range(count)]

    case(run)


def test_a_client_cannot_send_ahead_without_bound() -> None:
    async def run(proxy: Proxy) -> None:
        gate = asyncio.Event()

        async def script(engine: object, seen: object, reader: Reader, writer: Writer) -> None:
            await gate.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        proxy.engine.script = script
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        one = request(b"POST", b"/", b"x" * 10_000)
        for _ in range(3200):
            writer.write(one)
        size, before = 0, -1
        while size != before:  # until the sockets between are full
            before = size
            await asyncio.sleep(0.3)
            size = writer.transport.get_write_buffer_size()
        assert size > 8 << 20  # of 32 MB, and sockets hold at most a few of the rest
        gate.set()
        for _ in range(3200):
            assert (await asyncio.wait_for(read_answer(reader), WAIT_S)).status == 200
        writer.close()

    case(run)


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5))
def test_any_bytes_leave_the_server_standing(blobs: list[bytes]) -> None:
    async def run(proxy: Proxy) -> None:
        for blob in blobs:
            for data in (blob, POST + blob, CHUNKED + blob, request(b"POST", b"/", b"x") + blob):
                _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
                writer.write(data)
                writer.write_eof()
                await asyncio.sleep(0)
                writer.close()
        assert (await ask(proxy.port, b"POST", b"/", b"sane")).body == b"POST / sane"

    case(run)


def test_a_client_waits_for_leave_to_send_its_body() -> None:
    async def run(proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for body in (b"one", b"two"):
            writer.write(POST + b"expect: 100-Continue\r\ncontent-length: 3\r\n\r\n")
            assert await asyncio.wait_for(reader.readuntil(END), WAIT_S) == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await asyncio.wait_for(read_answer(reader), WAIT_S)).body == b"POST / " + body
        writer.write(POST + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\nthree")  # which does not wait
        assert (await asyncio.wait_for(read_answer(reader), WAIT_S)).body == b"POST / three"
        assert all(b"expect" not in dict(seen.headers) for seen in proxy.engine.requests)
        writer.close()

    case(run)


@pytest.mark.parametrize(
    "body", [b"content-length: 2\r\n\r\nhi", b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"]
)
def test_a_change_to_http_2_is_declined_by_answering(body: bytes) -> None:
    """Java's client asks for it with every first request, and sends its body in HTTP/1.1."""

    async def run(proxy: Proxy) -> None:
        relaying = proxy.server.handler

        async def handler(exchange: Exchange) -> None:
            assert exchange.upgrade is None
            await relaying(exchange)

        proxy.server.handler = handler
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for _ in range(2):
            writer.write(POST + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n" + body)
            assert (await asyncio.wait_for(read_answer(reader), WAIT_S)).body == b"POST / hi"
        assert {b"upgrade", b"connection"}.isdisjoint(dict(proxy.engine.requests[0].headers))
        writer.close()

    case(run)


def test_http_1_0() -> None:
    async def run(proxy: Proxy) -> None:
        stream = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nwhole\r\n0\r\n\r\n"
        known = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwhole"
        for answer in (stream, known):
            proxy.engine.script = lambda *args, answer=answer: _write(args[3], answer)
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            head, _, body = (await asyncio.wait_for(reader.read(-1), WAIT_S)).partition(END)
            assert body == b"whole" and b"chunked" not in head and b"connection: close" in head
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            kept = await asyncio.wait_for(read_answer(reader), WAIT_S)
            assert (kept.body, kept.header(b"connection")) == (b"whole", b"keep-alive")
        writer.close()

    case(run)


async def _write(writer: Writer, data: bytes) -> None:
    writer.write(data)


@pytest.mark.parametrize("value", [b"close", b"Close", b"x, close"])
def test_a_client_that_says_close_gets_its_answer_and_the_end(value: bytes) -> None:
    async def run(proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request(b"POST", b"/", b"last", [(b"connection", value)]) + request(b"GET", b"/more"))
        answer = await asyncio.wait_for(read_answer(reader), WAIT_S)
        assert (answer.body, answer.header(b"connection")) == (b"POST / last", b"close")
        assert await asyncio.wait_for(reader.read(-1), WAIT_S) == b""
        assert len(proxy.engine.requests) == 1
        writer.close()

    case(run)


def test_an_engine_that_says_close_is_not_asked_again_there() -> None:
    async def run(proxy: Proxy) -> None:
        proxy.engine.script = lambda *args: _write(
            args[3], b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for _ in range(3):
            writer.write(request())
            answer = await asyncio.wait_for(read_answer(reader), WAIT_S)
            assert (answer.body, answer.header(b"connection")) == (b"ok", None)
        assert proxy.engine.accepted == 3
        writer.close()

    case(run)
