"""Active health: asks engines how they are."""

import asyncio
from collections.abc import Callable
from math import inf

from deepinfer_router.engine_state import EngineState
from deepinfer_router.fleet import Fleet
from deepinfer_router.http_response import UpstreamError
from deepinfer_router.rounds import Fetch, Rounds
from deepinfer_router.target import Engine

_MOST_BYTES = 64 << 10
_WELL = frozenset((EngineState.READY, EngineState.DRAINING))


class Probes:
    """Tells a `Fleet(probed=True)` who lives: `rounds.once()` before the first request, then `rounds.run()`.

    Any status below 500 is life, for not everything in front of engines knows the path. An engine whose circuit is
    open is asked when its pause is over.
    """

    def __init__(self, fleet: Fleet, fetch: Fetch, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._fetch = fetch
        self._clock = clock
        self._config = fleet.config
        self.rounds = Rounds(fleet, self.ask, self._pause_s, clock)

    async def ask(self, engine: Engine) -> None:
        """Probes it once and tells the fleet."""
        path = self._config.probe_path
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                status, _ = await self._fetch(engine, path, _MOST_BYTES)
        except Exception as error:
            unreachable = isinstance(error, UpstreamError) and error.kind == "connect"
            self._failed(engine, f"probe of {path}: {str(error) or type(error).__name__}", unreachable)
            return
        if status < 500:
            self._fleet.alive(engine)
        else:
            self._failed(engine, f"probe of {path}: status {status}")

    def _failed(self, engine: Engine, kind: str, unreachable: bool = False) -> None:
        # What has not started yet is not broken.
        if engine.state is not EngineState.STARTING:
            self._fleet.failed(engine, kind, unreachable=unreachable)

    def _pause_s(self, engine: Engine) -> float:
        if engine.state is EngineState.OPEN:
            # With the rounds' own spread this is asked in time: their last question was at least this long ago.
            late = self._clock() >= self._fleet.health.retry_at(engine)
            return self._config.probe_soon_s if late else inf
        return self._config.probe_s if engine.state in _WELL else self._config.probe_soon_s
