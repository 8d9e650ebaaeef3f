"""Exchanges in which both sides do what they like: every answer that is whole is right, and nothing is left."""

import asyncio
import logging
import random
from contextlib import suppress

import pytest
from router_http_case import WAIT_S, Engine, Proxy, Reader, Seen, Writer, case, read_answer, request, until

from deepinfer_router.http_config import Limits, Timeouts

EXCHANGES = 2000
AT_A_TIME = 50
LOST = (asyncio.IncompleteReadError, ConnectionError, RuntimeError)  # uvloop's, of a closed transport


async def moody(engine: Engine, seen: Seen, reader: Reader, writer: Writer) -> None:
    """Echoes the body, whole or in chunks, in one go or slowly, or breaks off, at any place, in any way."""
    chance = random.Random(seen.body + len(engine.requests).to_bytes(4, "big"))
    if chance.random() < 0.5:
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(seen.body), seen.body)
    else:
        answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        size = chance.randrange(1, len(seen.body) + 2)
        for start in range(0, len(seen.body), size):
            piece = seen.body[start : start + size]
            answer += b"%x\r\n%b\r\n" % (len(piece), piece)
        answer += b"0\r\n\r\n"
    mood = chance.random()
    if mood < 0.15:
        answer = answer[: chance.randrange(len(answer))]
    with suppress(*LOST):
        while answer:
            cut = chance.randrange(1, len(answer) + 1)
            writer.write(answer[:cut])
            answer = answer[cut:]
            await writer.drain()
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.01)
    if mood < 0.05:
        writer.transport.abort()
    elif mood < 0.10 or 0.15 < mood < 0.2:  # the latter closes a connection that may be in the pool
        writer.close()
    elif mood < 0.15:
        assert await reader.read(1) == b""  # stalls
        writer.close()


async def whimsical(proxy: Proxy, number: int, whole: list[int]) -> None:
    """A client of one to three requests that may leave at any time."""
    chance = random.Random(number)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    bodies = [b"%d " % number + chance.randbytes(chance.randrange(20_000)) for _ in range(chance.randrange(1, 4))]
    stream = b"".join(request(b"POST", b"/%d" % number, body) for body in bodies)
    leaves = chance.random() < 0.3
    if leaves:
        stream = stream[: chance.randrange(len(stream))]
    with suppress(*LOST):
        while stream:
            cut = chance.randrange(1, len(stream) + 1)
            writer.write(stream[:cut])
            stream = stream[cut:]
            await asyncio.sleep(chance.random() * 0.005)
        if leaves:
            await asyncio.sleep(chance.random() * 0.01)
            writer.transport.abort() if chance.random() < 0.5 else writer.write_eof()
        for body in bodies:
            answer = await asyncio.wait_for(read_answer(reader), WAIT_S)
            if answer.status == 200:
                assert answer.body == body
                whole.append(number)
            else:
                assert answer.status == 502
    writer.close()


def test_nothing_is_left_of_two_thousand_exchanges(caplog: pytest.LogCaptureFixture) -> None:
    async def run(proxy: Proxy) -> None:
        proxy.engine.script = moody
        whole: list[int] = []
        turns = asyncio.Semaphore(AT_A_TIME)

        async def one(number: int) -> None:
            async with turns:
                await whimsical(proxy, number, whole)

        await asyncio.gather(*[one(number) for number in range(EXCHANGES)])
        await until(lambda: not proxy.server.connections and not proxy.server.tasks)
        await until(lambda: proxy.upstream.connections == 0)
        assert proxy.server.buffered_bytes == 0
        assert len(whole) > EXCHANGES / 2
        assert {"complete", "upstream_lost", "stalled", "client_gone"} <= {
            one for one in proxy.outcomes if isinstance(one, str)
        }

    with caplog.at_level(logging.WARNING):
        timeouts = Timeouts(idle_s=0.5, first_byte_s=1.0)
        case(run, limits=Limits(body_timeout_s=WAIT_S), timeouts=timeouts, stall_s=1.0, first_data_s=1.0)
    assert [record for record in caplog.records if record.name.startswith("deepinfer")] == []
