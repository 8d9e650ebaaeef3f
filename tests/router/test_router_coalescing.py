"""Streams that come in bursts are read less often; what clients get of them stays the same."""

import asyncio

import pytest
from router_http_case import WAIT_S, Engine, Proxy, Reader, Seen, Writer, ask, case, chunked, request, until

from deepinfer_router.coalescing import Coalescing
from deepinfer_router.engine_connection import EngineConnection
from deepinfer_router.http_config import Timeouts

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"data: 1\n\n"
PAIR = b"9\r\n%b\r\n" % EVENT * 2
END = b"0\r\n\r\n"
RESTS = Timeouts(coalesce_s=1.0)
"""So long that a test sees it."""


class _Stream:
    def __init__(self) -> None:
        self.reads = True

    def rest(self) -> None:
        self.reads = False

    def read_on(self) -> None:
        self.reads = True


def test_the_third_burst_within_a_tick_is_the_last_before_its_end() -> None:
    async def run() -> None:
        coalescing = Coalescing(asyncio.get_running_loop(), 0.001)
        busy, other = _Stream(), _Stream()
        for _ in range(2):
            coalescing.burst(busy)
            coalescing.burst(other)
            assert busy.reads and other.reads
        coalescing.burst(busy)
        assert not busy.reads and other.reads
        await until(lambda: busy.reads)
        for _ in range(2):  # they are counted anew
            coalescing.burst(busy)
        assert busy.reads

    asyncio.run(run())


def test_without_a_rest_nothing_is_counted() -> None:
    async def run() -> None:
        coalescing, stream = Coalescing(asyncio.get_running_loop(), 0.0), _Stream()
        for _ in range(100):
            coalescing.burst(stream)
        assert stream.reads

    asyncio.run(run())


@pytest.mark.parametrize("rest_s", [0.0, 0.002, 0.02])
def test_a_flood_comes_byte_for_byte(rest_s: float) -> None:
    """Without rests is what the others are compared to: one read after another, as they come."""
    events = [b"data: %d %b\n\n" % (number, b"x" * (number % 700)) for number in range(5000)]

    async def run(proxy: Proxy) -> None:
        proxy.engine.script = chunked(*events)
        answers = await asyncio.gather(*(ask(proxy.port) for _ in range(4)))
        assert all(answer.body == b"".join(events) for answer in answers)
        assert proxy.outcomes == ["complete"] * 4
        assert all(piece.endswith(b"\n\n") for piece in proxy.data)

    case(run, timeouts=Timeouts(coalesce_s=rest_s))


class _Told:
    """A stream that says what it is told to, and its client."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._told: asyncio.Queue[bytes] = asyncio.Queue()
        self.got = b""
        proxy.engine.script = self._script

    async def begin(self) -> EngineConnection:
        """Pairs of events until its connection rests, which is returned."""
        self._reader, self.client = await asyncio.open_connection("127.0.0.1", self._proxy.port)
        self.client.write(request(b"POST", b"/", b"{}"))
        events = 0
        while True:
            self.say(PAIR)
            events += 2
            await self.read(events)
            [connection] = self._proxy.upstream._open
            if not connection._transport.is_reading():
                return connection

    def say(self, data: bytes) -> None:
        self._told.put_nowait(data)

    async def read(self, events: int) -> None:
        """Until it has had so many in all, or its connection has ended."""
        async with asyncio.timeout(WAIT_S):
            while self.got.count(EVENT) < events and (data := await self._reader.read(65536)):
                self.got += data

    async def _script(self, engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
        writer.write(STREAM)
        while data := await self._told.get():
            writer.write(data)
        writer.close()


def test_what_comes_during_a_rest_comes_after_it() -> None:
    async def run(proxy: Proxy) -> None:
        told = _Told(proxy)
        connection = await told.begin()
        before = told.got.count(EVENT)
        for _ in range(50):
            told.say(PAIR)
        told.say(END)
        await told.read(before + 100)
        await until(lambda: proxy.outcomes == ["complete"])
        assert b"".join(proxy.data) == EVENT * (before + 100)
        assert connection._transport.is_reading()
        told.client.close()

    case(run, timeouts=RESTS)


def test_a_client_that_leaves_during_a_rest_takes_the_engine_s_work_with_it() -> None:
    async def run(proxy: Proxy) -> None:
        told = _Told(proxy)
        await told.begin()
        told.client.close()
        await until(lambda: proxy.outcomes == ["client_gone"] and not proxy.upstream.connections)

    case(run, timeouts=RESTS)


def test_an_engine_that_dies_during_a_rest_is_noticed_after_it() -> None:
    async def run(proxy: Proxy) -> None:
        told = _Told(proxy)
        await told.begin()
        before = told.got.count(EVENT)
        told.say(PAIR)
        told.say(b"")
        await told.read(before + 2)
        await until(lambda: proxy.outcomes == ["upstream_lost"])
        assert b"".join(proxy.data) == EVENT * (before + 2)

    case(run, timeouts=RESTS)


def test_a_rest_s_end_reads_nothing_that_the_client_has_no_room_for() -> None:
    async def run(proxy: Proxy) -> None:
        told = _Told(proxy)
        connection = await told.begin()
        connection.hold(True)
        await until(lambda: not proxy.upstream.coalescing.resting)
        assert not connection._transport.is_reading()
        connection.hold(False)
        assert connection._transport.is_reading()
        told.client.close()
        await until(lambda: proxy.outcomes == ["client_gone"])

    case(run, timeouts=RESTS)
