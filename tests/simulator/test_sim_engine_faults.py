"""Each way in which the mock engine fails, as a client on a raw socket sees it."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_faults import KINDS, Fault
from deepinfer_simulator.engine_server import MockEngine
from mock_engines import mock_engines, until

BODY = json.dumps({"prompt": "once", "max_tokens": 8, "stream": True}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def ask(
    engine: MockEngine, data: bytes = REQUEST, until_bytes: bytes = b"[DONE]\n\n\r\n0\r\n\r\n"
) -> tuple[bytes, str]:
    """What came, and how it ended: complete, FIN, RST, refused, stalled."""
    found = b""
    try:
        reader, writer = await asyncio.open_connection(engine.host, engine.port)
        writer.write(data)
        while until_bytes not in found:
            piece = await asyncio.wait_for(reader.read(65536), 2.0)
            if not piece:
                return found, "FIN"
            found += piece
        writer.close()
        return found, "complete"
    except ConnectionRefusedError:
        return found, "refused"
    except ConnectionResetError:
        return found, "RST"
    except TimeoutError:
        writer.close()  # else it stays open until it is collected, and the engine busy
        return found, "stalled"


@pytest.mark.parametrize(
    ("fault", "end", "events"),
    [
        ({"kind": "reset_before"}, "RST", 0),
        ({"kind": "reset_mid", "after_events": 3}, "RST", 3),
        ({"kind": "fin_mid", "after_events": 3}, "FIN", 3),
        ({"kind": "stall_before"}, "stalled", 0),
        ({"kind": "stall_mid", "after_events": 2}, "stalled", 2),
        ({"kind": "malformed_chunk", "after_events": 2}, "FIN", 2),
        ({"kind": "slow_head", "seconds": 0.01}, "complete", 8),
        ({"kind": "split", "size": 1}, "complete", 8),
    ],
)
def test_streams_fail_as_asked_and_once(fault: dict[str, Any], end: str, events: int) -> None:
    async def work() -> None:
        async with mock_engines() as (engine,):
            engine.faults.set(**fault, times=1)
            found, how = await ask(engine)
            assert how == end
            if how != "RST":  # a reset may overtake what was sent
                assert found.count(b'"finish_reason"') == events
            assert (await ask(engine))[1] == "complete"
            await until(lambda: engine.running == 0)

    run(work())


def test_answers_may_be_compressed_padded_and_the_last_on_their_connection() -> None:
    async def work() -> None:
        async with mock_engines() as (engine,):
            engine.faults.set("gzip")
            engine.faults.set("huge_headers", size=50_000)
            engine.faults.set("close_each")
            request = REQUEST.replace(b'"stream": true', b'"stream": null')
            found, how = await ask(engine, request)
            head, _, body = found.partition(b"\r\n\r\n")
            assert how == "FIN" and b"content-encoding: gzip" in head and len(head) > 50_000
            assert json.loads(gzip.decompress(body))["object"] == "text_completion"

    run(work())


def test_a_status_comes_with_retry_after() -> None:
    async def work() -> None:
        async with mock_engines() as (engine,):
            engine.faults.set("status", status=429, retry_after_s=7)
            found, _ = await ask(engine, until_bytes=b"}}")
            assert found.startswith(b"HTTP/1.1 429 ") and b"retry-after: 7\r\n" in found

    run(work())


def test_refused_and_restarted_at_the_same_address() -> None:
    async def work() -> None:
        async with mock_engines() as (engine,):
            before = engine.engine_id
            engine.refuse()
            assert (await ask(engine))[1] == "refused"
            await engine.listen_again()
            assert (await ask(engine))[1] == "complete"
            await engine.restart()
            assert (await ask(engine))[1] == "complete" and engine.engine_id != before

    run(work())


def test_faults_are_set_over_the_control_endpoint() -> None:
    async def work() -> None:
        async with mock_engines() as (engine,):
            for body, status in ((b'{"kind":"status","status":500}', b"200"), (b'{"kind":"no"}', b"400")):
                request = b"POST /mock/faults HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
                assert (await ask(engine, request, b"}"))[0].split()[1] == status
            assert (await ask(engine, until_bytes=b"}}"))[0].split()[1] == b"500"
            await ask(engine, b"DELETE /mock/faults HTTP/1.1\r\n\r\n", b"{}")
            assert (await ask(engine))[1] == "complete"
            found, _ = await ask(engine, b"GET /mock/state HTTP/1.1\r\n\r\n", b"}}")
            assert json.loads(found.partition(b"\r\n\r\n")[2])["counts"]["refused"] == 1

    run(work())


def test_restart_over_the_control_endpoint() -> None:
    async def work() -> None:
        async with mock_engines() as (engine,):
            before = engine.engine_id
            for query, status in ((b"soon", b"400"), (b"0.01", b"200")):
                request = b"POST /mock/restart?%b HTTP/1.1\r\ncontent-length: 0\r\n\r\n" % query
                assert (await ask(engine, request, b"}"))[0].split()[1] == status
            await until(lambda: engine.engine_id != before)
            while (await ask(engine))[1] == "refused":
                await asyncio.sleep(0.01)
            assert (await ask(engine))[1] == "complete"

    run(work())


def test_a_client_that_leaves_is_an_abort() -> None:
    async def work() -> None:
        async with mock_engines(1, EngineConfig(time_scale=1.0)) as (engine,):
            _, writer = await asyncio.open_connection(engine.host, engine.port)
            writer.write(REQUEST)
            await until(lambda: engine.running == 1)
            writer.close()
            await until(lambda: engine.running == 0)
            assert engine.counts["abort"] == 1 and engine.ranks[0].held_tokens == 0

    run(work())


def test_pipelined_requests_and_one_that_waits_for_100_continue() -> None:
    async def work() -> None:
        async with mock_engines() as (engine,):
            found, how = await ask(engine, REQUEST * 2, b"[DONE]")
            assert how == "complete"
            reader, writer = await asyncio.open_connection(engine.host, engine.port)
            writer.write(REQUEST.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n", 1)[: -len(BODY)])
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(BODY)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await until(lambda: engine.counts["/v1/completions"] == 3 and engine.running == 0)

    run(work())


def test_a_fault_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="fault 'melt' is unknown: there are refuse"):
        Fault("melt")  # type: ignore[arg-type]
    assert len(KINDS) == 14
