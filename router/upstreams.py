"""The connections to each engine."""

import asyncio

from deepinfer_router.fleet import Fleet
from deepinfer_router.http_client import Upstream
from deepinfer_router.http_config import EngineTls, Timeouts
from deepinfer_router.outgoing import Turn
from deepinfer_router.target import Engine


class Upstreams:
    """Made as engines are asked; closed when the fleet forgets one. The event loop's thread only."""

    def __init__(self, fleet: Fleet, timeouts: Timeouts, tls: EngineTls) -> None:
        self._fleet = fleet
        self._timeouts = timeouts
        self._tls = tls
        self._turn = Turn(asyncio.get_running_loop())
        self._by_engine: dict[Engine, Upstream] = {}
        fleet.subscribe(self._forget_gone)

    def of(self, engine: Engine) -> Upstream:
        """The connections to `engine`, of this life of it."""
        upstream = self._by_engine.get(engine)
        if upstream is None:
            upstream = self._by_engine[engine] = Upstream(engine.url, self._timeouts, self._tls, self._turn)
        return upstream

    @property
    def connections(self) -> int:
        """Open ones, to all engines."""
        return sum(upstream.connections for upstream in self._by_engine.values())

    async def close(self) -> None:
        """End all of them."""
        for upstream in self._by_engine.values():
            await upstream.close()
        self._by_engine.clear()

    def _forget_gone(self) -> None:
        """Answers under way go on; connections of the pool end by themselves after their idle time."""
        if len(self._by_engine) > len(self._fleet.engines):
            known = set(self._fleet.engines.values())
            for engine in [engine for engine in self._by_engine if engine not in known]:
                del self._by_engine[engine]
