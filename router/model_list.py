"""The list of models of a fleet whose engines serve different ones: each engine knows only its own."""

import orjson

from deepinfer_router.errors import Refusal
from deepinfer_router.fleet import Fleet
from deepinfer_router.hop import HopFailed, ask
from deepinfer_router.http_client import UpstreamError
from deepinfer_router.http_headers import uncoded
from deepinfer_router.journey import Journey
from deepinfer_router.roles import Role
from deepinfer_router.target import Target
from deepinfer_router.upstreams import Upstreams

_MAX_BYTES = 16 << 20
_PATIENCE_S = 10.0


class ModelList:
    """Asks one engine of each kind, and another where that one does not answer. The event loop's thread only."""

    def __init__(self, fleet: Fleet, upstreams: Upstreams) -> None:
        self._fleet = fleet
        self._upstreams = upstreams

    def several(self) -> bool:
        """Whether engines serve different models; else any of them can be asked."""
        return len({engine.models for engine in self._fleet.engines.values()}) > 1

    async def answer(self, journey: Journey) -> None:
        """The entries of all, each model once. Raises Refusal: no engine answers."""
        entries: dict[str, object] = {}
        answered: set[tuple[str, ...]] = set()
        for engine in dict.fromkeys((*self._fleet.at_work(Role.DECODE), *self._fleet.at_work(Role.PREFILL))):
            if engine.models in answered:
                continue
            try:
                said = await self._ask(journey, engine.targets[0])
            except HopFailed:
                continue  # the next of its kind is asked
            answered.add(engine.models)
            for entry in said:
                if isinstance(entry, dict):
                    entries.setdefault(str(entry.get("id")), entry)
        if not answered:
            raise Refusal(503, "no_engine", "no engine says which models it serves; try again", retry_after_s=1)
        body = orjson.dumps({"object": "list", "data": list(entries.values())})
        journey.outcome = "served"
        journey.exchange.respond(200, [(b"content-type", b"application/json")], body)

    async def _ask(self, journey: Journey, target: Target) -> list[object]:
        exchange = journey.exchange
        with self._fleet.book(target, journey.request.work, Role.ENCODE) as lease:
            headers = uncoded(journey.headers)
            response = await ask(self._upstreams, lease, exchange.method, exchange.path, headers, b"", _PATIENCE_S)
            try:
                said = orjson.loads(await response.read(_MAX_BYTES, stall_s=_PATIENCE_S))
            except (UpstreamError, orjson.JSONDecodeError) as error:
                raise HopFailed(target.engine, "protocol", f"engine {target.engine.id}: no list of models") from error
        entries = said.get("data") if isinstance(said, dict) else None
        return entries if response.status == 200 and isinstance(entries, list) else []
