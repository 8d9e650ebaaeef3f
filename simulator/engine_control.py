"""What others may tell a live mock engine over HTTP: to fail, to restart, and to hand over blocks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from deepinfer_simulator.engine_http import Request

if TYPE_CHECKING:
    from deepinfer_simulator.engine_server import MockEngine

MOST_SECONDS = 3600.0


async def control(engine: MockEngine, request: Request) -> None:
    """/mock/state; /mock/faults: POST {kind, ...}, or DELETE; /mock/restart?SECONDS; /mock/kv, for blocks."""
    what, _, rest = request.path.removeprefix("/mock/").partition("/")
    if what == "kv":
        how, _, name = rest.partition("/")
        meant = f"engine={engine.engine_id}" in request.query  # and not the one before a restart
        waits = how == "read" and "wait=1" in request.query
        held = await engine.transfer.give(unquote(name), waits) if meant else 0
        await request.answer(200, str(held).encode())
    elif what == "faults":
        await _faults(engine, request)
    elif what == "restart":
        await _restart(engine, request)
    elif what == "state":
        leases = {"held": len(engine.transfer.leases), "expired": engine.transfer.expired}
        await request.answer(200, {"counts": engine.counts, "running": engine.running, "leases": leases})
    else:
        await request.answer(404, engine.error(request.path, 404, "there are state, faults and restart"))


async def _restart(engine: MockEngine, request: Request) -> None:
    try:
        seconds = float(request.query or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_SECONDS:
        message = f"restart?{request.query}: seconds from 0 to {MOST_SECONDS:.0f} are needed"
        await request.answer(400, engine.error(request.path, 400, message))
        return
    await request.answer(200, {})
    _in_background(engine.restart(seconds))


async def _faults(engine: MockEngine, request: Request) -> None:
    if request.method == "DELETE":
        engine.faults.clear()
    else:
        try:
            fault = engine.faults.set(**request.json())
        except (TypeError, ValueError) as error:
            await request.answer(400, engine.error(request.path, 400, str(error)))
            return
        if fault.kind == "refuse":
            engine.refuse()
            _in_background(_refuse_for(engine, fault.seconds))
    await request.answer(200, {})


async def _refuse_for(engine: MockEngine, seconds: float) -> None:
    await asyncio.sleep(seconds)
    engine.faults.clear("refuse")
    with contextlib.suppress(OSError):
        await engine.listen_again()


def _in_background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


_background: set[asyncio.Task[None]] = set()
