"""Engines' load and state as metrics, of all workers together."""

from typing import Any

from deepinfer_router.metrics import Family, Gauge, Registry

Row = dict[str, Any]


class EngineGauges:
    """In the supervisor: workers that count the same engine's strangers are not to be added up."""

    def __init__(self, registry: Registry) -> None:
        self._of_ranks: dict[str, Family[Gauge]] = {
            name: registry.gauge(f"engine_{metric}", text, "engine", "rank")
            for name, metric, text in (
                ("active", "active_requests", "Requests that it has."),
                ("kv_tokens", "kv_tokens", "KV tokens held or promised."),
                ("capacity_tokens", "kv_capacity_tokens", "KV tokens that it has room for, where that is known."),
                ("pending_seconds", "pending_prefill_seconds", "Predicted seconds of prefill that wait or run."),
            )
        }
        self._states = registry.gauge("engine_state", "1 for the state that most workers see it in.", "engine", "state")
        self._shown: set[tuple[Family[Gauge], tuple[str, str]]] = set()

    def show(self, engines: list[Row]) -> None:
        """`engines`: of `merged_engines`. Those that are not there any more are shown no more."""
        shown = set()
        for engine in engines:
            values = [(self._states, (engine["id"], engine["state"]), 1.0)]
            for rank in engine["ranks"]:
                key = (engine["id"], str(rank["rank"]))
                values += [(family, key, rank[name]) for name, family in self._of_ranks.items()]
            for family, labels, value in values:
                if value is not None:
                    family.labels(*labels).set(value)
                    shown.add((family, labels))
        for family, labels in self._shown - shown:
            family.remove(*labels)
        self._shown = shown
