"""Mock engines for tests: in the test's own event loop, or in a thread beside a test that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_server import MockEngine


@contextlib.asynccontextmanager
async def mock_engines(count: int = 1, config: EngineConfig | None = None) -> AsyncIterator[list[MockEngine]]:
    """`count` engines that listen, in this event loop."""
    engines = [MockEngine(config) for _ in range(count)]
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


@contextlib.contextmanager
def loop_in_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread: `asyncio.run_coroutine_threadsafe(work, loop).result(timeout)`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


@contextlib.contextmanager
def mock_engines_in_thread(count: int = 1, config: EngineConfig | None = None) -> Iterator[list[MockEngine]]:
    """`count` engines that listen, for a test that blocks; read their fields, change them through `faults` alone."""
    with loop_in_thread() as loop:
        engines = [MockEngine(config) for _ in range(count)]

        def wait(work: Any) -> None:
            asyncio.run_coroutine_threadsafe(work, loop).result(30)

        try:
            for engine in engines:
                wait(engine.start())
            yield engines
        finally:
            for engine in engines:
                wait(engine.stop())


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until `condition()` is true. Raises TimeoutError after so long: a bound, never the time a test needs."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
