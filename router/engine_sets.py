"""Applies what sources know of engines, and what operators drain, to a worker's fleet."""

from collections.abc import Sequence

from deepinfer_router.discovery import PlainEngine
from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.engine_state import EngineState
from deepinfer_router.fleet import Fleet
from deepinfer_router.roles import Role


class EngineSets:
    """The engines of each source, added to each other. One that no source names any more finishes what it has.

    For the event loop's thread.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._sets: dict[str, list[PlainEngine]] = {}
        self._drained: set[str] = set()

    def set(self, source: str, engines: Sequence[PlainEngine]) -> None:
        """`source` knows exactly these. Of two sources that name the same id, the first in the alphabet is heard."""
        self._sets[source] = list(engines)
        self._apply()

    def drain(self, engine: str, on: bool) -> None:
        """Whatever sources say, it gets no new work; or it does again."""
        (self._drained.add if on else self._drained.discard)(engine)
        self._apply()

    def sweep(self) -> None:
        """Forget engines that are gone and have nothing left. Call it now and then."""
        wanted = {engine["id"] for _, engines in self._sets.items() for engine in engines}
        for id, engine in list(self._fleet.engines.items()):
            if id not in wanted and not any(target.active for target in engine.targets):
                self._fleet.remove(id)

    def _apply(self) -> None:
        wanted: dict[str, PlainEngine] = {}
        for _, engines in sorted(self._sets.items()):
            for engine in engines:
                wanted.setdefault(engine["id"], engine)
        for id, engine in wanted.items():
            known = self._fleet.add(spec(engine))
            if id in self._drained or engine.get("draining"):
                self._fleet.drain(id)
            elif known.state is EngineState.DRAINING:
                self._fleet.resume(id)
        for id in list(self._fleet.engines):
            if id not in wanted:
                self._fleet.drain(id)
        self.sweep()


def spec(engine: PlainEngine) -> EngineSpec:
    """What the fleet is told of it."""
    return EngineSpec(
        url=engine["url"],
        id=engine["id"],
        roles=frozenset(Role(role) for role in engine["roles"]),
        models=tuple(engine["models"]),
        ranks=engine["ranks"],
        capacity_tokens=engine["capacity_tokens"],
        engine_class=engine["engine_class"],
    )
