"""What keeps views fresh, in whole routers: two workers of one host in front of a simulated engine."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_router import meeting_place
from deepinfer_router.app import App
from deepinfer_router.config import RouterConfig
from deepinfer_router.engine_state import EngineState
from deepinfer_router.roles import Role
from deepinfer_router.target import NOTHING
from deepinfer_router.work import Work
from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_server import MockEngine


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def app(url: str, workers: int) -> App:
    settings = {"engines": [{"url": url}], "process": {"workers": workers}, "fleet": {"poll_s": 0.05, "probe_s": 0.1}}
    return App(RouterConfig.model_validate(settings))


def test_workers_see_each_other_and_one_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_place, "_MEMORY", tmp_path)

    async def main() -> None:
        server = MockEngine(EngineConfig(capacity_tokens=1 << 16))
        await server.start()
        first, second = app(server.url, 2), app(server.url, 2)
        await first.start()
        await second.start()
        (directory,) = tmp_path.iterdir()
        here, there = (each.fleet.targets(Role.DECODE)[0] for each in (first, second))
        await until(lambda: there.capacity_tokens == here.capacity_tokens == 1 << 16)
        lease = first.fleet.book(here, Work(prompt_tokens=100, expected_output=20), Role.DECODE, 0.5)
        await until(lambda: (there.active, there.kv_tokens, there.pending_seconds) == (1, 120, 0.5))
        lease.release()
        await until(lambda: there.peers == NOTHING)
        # The one that polled goes: the other does.
        await first.close()
        await until(lambda: len(os.listdir(directory)) == 1)
        there.capacity_tokens = None
        await until(lambda: there.capacity_tokens == 1 << 16)
        await second.close()
        assert list(tmp_path.iterdir()) == []
        await server.stop()

    asyncio.run(main())


def test_alone_nothing_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_place, "_MEMORY", tmp_path)

    async def main() -> None:
        server = MockEngine(EngineConfig(capacity_tokens=1 << 16))
        await server.start()
        alone = app(server.url, 1)
        await alone.start()
        target = alone.fleet.targets(Role.DECODE)[0]
        assert target.capacity_tokens == 1 << 16
        assert list(tmp_path.iterdir()) == []
        # Probes find it gone, though nobody asks; the last engine stays, with one request at a time.
        await server.stop()
        await until(lambda: target.engine.state is EngineState.SUSPECT and target.window == 1)
        await alone.close()

    asyncio.run(main())


def test_without_a_place_to_meet_workers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(meeting_place, "_MEMORY", tmp_path / "file")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))

    async def main() -> None:
        server = MockEngine(EngineConfig())
        await server.start()
        worker = app(server.url, 2)
        await worker.start()
        assert worker.fleet.targets(Role.DECODE)[0].capacity_tokens == 1 << 22
        await worker.close()
        await server.stop()

    asyncio.run(main())
