"""The access log: what a line says, rotation, and a disk that takes nothing."""

import asyncio
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from routed import CHAT, routed
from scripted_engine import answer, streamed
from scripted_stream import stream

from deepinfer_router import access_log
from deepinfer_router.access_log import AccessLog
from deepinfer_router.api import Kind
from deepinfer_router.telemetry_config import AccessLogConfig


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_line_says_what_became_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    events = stream(Kind.CHAT, [1, 2], [0, 1, 0], with_ids=False)

    async def main() -> None:
        async with routed([streamed(events)], access_log={"path": str(path)}) as router:
            await router.ask(headers={"x-request-id": "mine"}, stream=True)
            await router.ask(CHAT, model=7)

    asyncio.run(main())
    served, refused = lines(path)
    expected = {
        "peer": "127.0.0.1",
        "method": "POST",
        "path": CHAT,
        "api": "chat",
        "status": 200,
        "request_id": "mine",
        "model": "m",
        "stream": True,
        "outcome": "served",
        "engine": "prefill-decode-0",
        "events": len(events),
    }
    assert expected.items() <= served.items()
    assert 0 < served["first_token_seconds"] <= served["seconds"]
    assert refused["status"] == 400 and "engine" not in refused


def test_successes_may_be_sampled_and_failures_are_not(tmp_path: Path) -> None:
    log = AccessLog(AccessLogConfig(path=tmp_path / "access.log", sample_ratio=1e-9))
    assert not any(log.wanted(200) for _ in range(100))
    assert all(log.wanted(status) for status in (400, 429, 500, 503))
    log.close()


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path, moved = tmp_path / "access.log", tmp_path / "access.log.1"

    async def main() -> None:
        async with routed([answer()], access_log={"path": str(path), "interval_s": 0.01}) as router:
            await router.ask()
            while not path.exists() or not path.read_bytes().endswith(b"\n"):
                await asyncio.sleep(0.01)
            os.rename(path, moved)
            await router.ask()
            while len(lines(moved)) < 2:  # still the old file
                await asyncio.sleep(0.01)
            router.app.reopen()
            await router.ask()

    asyncio.run(main())
    assert (len(lines(moved)), len(lines(path))) == (2, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to stand for a full disk")
def test_a_full_disk_is_counted_and_harms_no_request() -> None:
    before = access_log.LINES.labels("failed").value

    async def main() -> None:
        async with routed([answer()], access_log={"path": "/dev/full"}) as router:
            assert (await router.ask()).status == 200

    asyncio.run(main())
    assert access_log.LINES.labels("failed").value == before + 1


def test_a_directory_that_is_not_there_is_counted(tmp_path: Path) -> None:
    before = access_log.LINES.labels("failed").value
    log = AccessLog(AccessLogConfig(path=tmp_path / "nowhere" / "access.log"))
    log.add({"status": 200})
    log.close()
    assert access_log.LINES.labels("failed").value == before + 1


def test_lines_that_do_not_fit_are_dropped_and_counted(tmp_path: Path) -> None:
    before = access_log.LINES.labels("dropped").value
    log = AccessLog(AccessLogConfig(path=tmp_path / "access.log", max_lines=2, interval_s=60))
    for _ in range(5):
        log.add({"status": 200})
    log.close()
    assert access_log.LINES.labels("dropped").value == before + 3
    assert len(lines(tmp_path / "access.log")) == 2
