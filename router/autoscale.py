"""Recommendations for autoscaling: prefill by uncached work that arrives, decode by active requests."""

from collections.abc import Iterable
from math import exp
from typing import Any

from deepinfer_router.autoscale_stage import Limits, Recommendation, StageScale
from deepinfer_router.engine_state import GETS_WORK, EngineState
from deepinfer_router.metrics import Registry
from deepinfer_router.roles import Role

Row = dict[str, Any]
ARRIVED = ("arrived_seconds", "arrived_tokens", "waiting", "waiting_seconds")
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

    def __init__(self, limits: Limits, registry: Registry) -> None:
        """`registry`: where gauges of the last update are."""
        self._limits = limits
        self._seconds = _Rate(limits.smoothing_s)
        self._tokens = _Rate(limits.smoothing_s)
        self._stages = {role: StageScale(limits) for role in (Role.PREFILL, Role.DECODE)}
        self._why: dict[str, str] = {}
        stage = "stage"
        self._gauges = {
            "engines": registry.gauge("autoscale_engines", "Engines that get work.", stage),
            "desired": registry.gauge("autoscale_desired_engines", "Engines that there should be.", stage),
            "utilisation": registry.gauge("autoscale_utilisation", "What is in use of what they can do.", stage),
            "need": registry.gauge("autoscale_need_engines", "Engines that demand would keep as busy as meant.", stage),
        }
        self._blocked = registry.gauge(
            "autoscale_blocked", "1: fewer would do, and this speaks against it.", stage, "why"
        )
        self._arriving = registry.gauge("autoscale_uncached_tokens_per_second", "Prompt tokens to compute.").labels()
        self._active = registry.gauge("autoscale_active_requests", "Requests in decode, and those that wait.").labels()

    def update(self, engines: Iterable[Row], said: Iterable[Row], now: float) -> dict[str, Any]:
        """What to have, of plain types.

        `engines`: rows of `merged_engines`. `said`: of each worker what `ARRIVED` names: predicted seconds of prefill
        and uncached tokens that have come since its start, requests that wait for room, and what their prefill takes.

        An engine that does whole requests is in both stages: of those have the larger `desired`.
        """
        limits, rows = self._limits, list(engines)
        sums = dict.fromkeys(ARRIVED, 0.0)
        for status in said:
            for name in ARRIVED:
                sums[name] += status.get(name, 0)
        rate = self._seconds.see(sums["arrived_seconds"], now)
        tokens = self._tokens.see(sums["arrived_tokens"], now)
        prefill = [row for row in rows if Role.PREFILL in row["roles"]]
        decode = [row for row in rows if Role.DECODE in row["roles"]]
        backlog = sums["waiting_seconds"] + sum(row["pending_seconds"] for row in prefill)
        active = sums["waiting"] + sum(row["active"] for row in decode)
        # A rank does a second of prefill in a second.
        ranks = (rate + backlog / limits.backlog_s, active / limits.sequences_per_rank)
        result: dict[str, Any] = {}
        for (role, stage), own, used in zip(self._stages.items(), (prefill, decode), ranks, strict=True):
            if own:
                recommended = self._of(stage, own, used, now)
                self._show(str(role), recommended)
                result[str(role)] = recommended.to_json()
        if result:
            result |= {"uncached_tokens_per_s": tokens, "prefill_seconds_per_s": rate, "active_requests": active}
        self._arriving.set(tokens)
        self._active.set(active)
        return result

    def _show(self, stage: str, said: Recommendation) -> None:
        for name, family in self._gauges.items():
            family.labels(stage).set(getattr(said, name))
        self._blocked.remove(stage, self._why.get(stage, ""))
        if said.blocked:
            self._blocked.labels(stage, said.blocked).set(1)
        self._why[stage] = said.blocked

    def _of(self, stage: StageScale, rows: list[Row], used_ranks: float, now: float) -> Recommendation:
        able = [row for row in rows if row["state"] in _WORKS]
        ill = sum(row["state"] == EngineState.OPEN for row in rows)
        each = sum(len(row["ranks"]) for row in able or rows) / len(able or rows)
        return stage.update(len(able), ill, used_ranks / each, now)
