"""Recommendations for autoscaling: prefill by uncached work that arrives, decode by active requests."""

from collections.abc import Iterable
from math import exp
from typing import Any

from deepinfer_router.autoscale_config import AutoscaleConfig
from deepinfer_router.autoscale_stage import Recommendation, StageScale
from deepinfer_router.engine_state import GETS_WORK, EngineState
from deepinfer_router.roles import Role

Row = dict[str, Any]
_WORKS = {str(state) for state in GETS_WORK}


class _Rate:
    """Of a counter that only grows; where it falls, who counted has started again."""

    def __init__(self, memory_s: float) -> None:
        self.per_s = 0.0
        self._memory_s = memory_s
        self._last: tuple[float, float] | None = None

    def see(self, total: float, now: float) -> float:
        if self._last is None:
            self._last = total, now
        before, at = self._last
        if now > at:
            kept = exp((at - now) / self._memory_s)
            self.per_s = kept * self.per_s + (1.0 - kept) * max(0.0, total - before) / (now - at)
            self._last = total, now
        return self.per_s


class Autoscale:
    """Of one fleet, by what all of a host's workers report. Called as often as somebody looks; not thread-safe."""

    def __init__(self, config: AutoscaleConfig) -> None:
        self._config = config
        self._seconds = _Rate(config.smoothing_s)
        self._tokens = _Rate(config.smoothing_s)
        self._stages = {role: StageScale(config) for role in (Role.PREFILL, Role.DECODE)}
        self._last: dict[str, Any] = {}

    def update(
        self,
        engines: Iterable[Row],
        arrived_seconds: float,
        arrived_tokens: float,
        waiting: int,
        waiting_seconds: float,
        now: float,
    ) -> dict[str, Any]:
        """What to have, of plain types.

        `engines`: rows of `merged_engines`. `arrived_seconds`, `arrived_tokens`: predicted seconds of prefill and
        uncached tokens that have come, in all, since the start. `waiting`, `waiting_seconds`: requests in the router's
        queue, and what their prefill takes.

        An engine that does whole requests is in both stages: of those have the larger `desired`.
        """
        config, rows = self._config, list(engines)
        rate, tokens = self._seconds.see(arrived_seconds, now), self._tokens.see(arrived_tokens, now)
        prefill = [row for row in rows if Role.PREFILL in row["roles"]]
        decode = [row for row in rows if Role.DECODE in row["roles"]]
        backlog = waiting_seconds + sum(row["pending_seconds"] for row in prefill)
        active = waiting + sum(row["active"] for row in decode)
        # A rank does a second of prefill in a second.
        ranks = (rate + backlog / config.backlog_s, active / config.sequences_per_rank)
        result: dict[str, Any] = {}
        for (role, stage), own, used in zip(self._stages.items(), (prefill, decode), ranks, strict=True):
            if own:
                result[str(role)] = self._of(stage, own, used, now).to_json()
        if result:
            result["uncached_tokens_per_s"] = tokens
            result["prefill_seconds_per_s"] = rate
            result["active_requests"] = active
        self._last = result
        return result

    def gauges(self) -> list[tuple[str, dict[str, str], float]]:
        """(name without prefix, labels, value) of the last update."""
        rows: list[tuple[str, dict[str, str], float]] = []
        for name, value in self._last.items():
            if isinstance(value, dict):
                stage = {"stage": name}
                rows += [
                    (f"autoscale_{key}", stage, value[key]) for key in ("engines", "desired", "utilisation", "need")
                ]
                rows.append(("autoscale_blocked", stage | {"reason": value["blocked"] or "none"}, 1.0))
            else:
                rows.append((f"autoscale_{name}", {}, value))
        return rows

    def _of(self, stage: StageScale, rows: list[Row], used_ranks: float, now: float) -> Recommendation:
        able = [row for row in rows if row["state"] in _WORKS]
        ill = sum(row["state"] == EngineState.OPEN for row in rows)
        each = sum(len(row["ranks"]) for row in able or rows) / len(able or rows)
        return stage.update(len(able), ill, used_ranks / each, now)
