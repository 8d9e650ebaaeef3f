"""Mock engines as a process of their own: until SIGTERM or SIGINT."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import uvloop

from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_server import MockEngine


def serve(
    config: EngineConfig, host: str, ports: list[int], faults: list[dict[str, Any]], say: Callable[[str], None]
) -> None:
    """One engine a port (0: any free one), all with `faults`; `say` gets each URL once all listen. Raises OSError."""
    uvloop.run(_serve(config, host, ports, faults, say))


async def _serve(
    config: EngineConfig, host: str, ports: list[int], faults: list[dict[str, Any]], say: Callable[[str], None]
) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    engines = [MockEngine(config) for _ in ports]
    for engine, port in zip(engines, ports, strict=True):
        for fault in faults:
            engine.faults.set(**fault)
        await engine.start(host, port)
    for engine in engines:
        say(engine.url)
    await ended.wait()
    for engine in engines:
        await engine.stop()
