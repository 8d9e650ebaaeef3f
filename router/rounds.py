"""Asks every engine something again and again, each on its own beat."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf
from random import random

from deepinfer_router.fleet import Fleet
from deepinfer_router.target import Engine

logger = logging.getLogger(__name__)

Fetch = Callable[[Engine, str, int], Awaitable[tuple[int, bytes]]]
"""GET: (engine, path, most bytes of a body) -> (status, body). Raises where there is no whole answer."""

_NOT_AT_ONCE = 0.2
"""Beats vary by this share: engines that began together do not stay so."""
_TICK_S = 0.25


class Rounds:
    """One loop for all engines; of one engine one question at a time."""

    def __init__(
        self,
        fleet: Fleet,
        ask: Callable[[Engine], Awaitable[None]],
        pause_s: Callable[[Engine], float],
        clock: Callable[[], float],
    ) -> None:
        """`ask` limits its own time. `pause_s`: from a question to the next, inf: none; read every tick."""
        self._fleet = fleet
        self._ask = ask
        self._pause_s = pause_s
        self._clock = clock
        self._begun: dict[Engine, float] = {}
        self._asking: dict[Engine, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until it is cancelled; then no question is left."""
        try:
            while True:
                await asyncio.sleep(self._tick())
        finally:
            for task in self._asking.values():
                task.cancel()

    async def once(self) -> None:
        """Every engine once, now; returns when all have answered or failed."""
        engines = list(self._fleet.engines.values())
        self._begun |= dict.fromkeys(engines, self._clock())
        await asyncio.gather(*map(self._guarded, engines))

    def _tick(self) -> float:
        """Begins what is due; seconds until the next tick."""
        now = self._clock()
        tick_s = _TICK_S
        for engine in self._fleet.engines.values():
            pause_s = self._pause_s(engine)
            if pause_s == inf or engine in self._asking:
                continue
            tick_s = min(tick_s, pause_s / 4)
            if now - self._begun.get(engine, -inf) >= pause_s:
                self._begun[engine] = now - random() * _NOT_AT_ONCE * pause_s
                self._asking[engine] = asyncio.create_task(self._guarded(engine))
        for gone in [engine for engine in self._begun if self._fleet.engines.get(engine.id) is not engine]:
            del self._begun[gone]
        return tick_s

    async def _guarded(self, engine: Engine) -> None:
        try:
            await self._ask(engine)
        except Exception:
            # What engines do is handled by `ask`. This is an error of ours, which must not end the rounds.
            logger.exception("cannot ask engine %s", engine.id)
        finally:
            self._asking.pop(engine, None)
