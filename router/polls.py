"""Keeps the view of engines' loads: what their own metrics say that this host's routers do not know."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from deepinfer_router.engine_state import EngineState
from deepinfer_router.fleet import Fleet
from deepinfer_router.metrics import counter
from deepinfer_router.rounds import Fetch, Rounds
from deepinfer_router.scrape import MAX_BYTES, Reading, read_metrics
from deepinfer_router.target import NOTHING, Engine, Load, Target

logger = logging.getLogger(__name__)

_FAILED = counter("polls_failed", "Polls of an engine's metrics without an answer.").labels()
_POLL_S = 1.0
_POLL_AMONG_REPLICAS_S = 0.2
_POLLS_A_SECOND = 500
"""Of more engines each is asked more rarely: a poll takes some 0.15 ms here."""
_SILENT = frozenset((EngineState.STARTING, EngineState.OPEN))


@dataclass(slots=True)
class _Seen:
    """What is remembered of a target from poll to poll."""

    polled_at: float
    strangers: Load = NOTHING
    moved_at: float = 0.0
    learnt_tokens: int | None = None
    """Capacity by the last poll."""
    reading: Reading = field(default_factory=Reading)


class Polls:
    """Asks each engine for /metrics: `rounds.once()` before the first request, then `rounds.run()`.

    A target's load is what this host's routers have there, which they know exactly and at once, and `strangers`: what
    the engine reports beyond that. So a view is the last poll and all that was sent and has ended since; after a
    restart, what was under way before is strangers' until it ends. Between routers of one host nothing is counted
    twice, for `peers` are known too.
    """

    def __init__(
        self,
        fleet: Fleet,
        fetch: Fetch,
        clock: Callable[[], float],
        replicas: int = 1,
        observe: Callable[[int, int, float], None] | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """`replicas`: routers on other hosts and this; then strangers are many, and come and go between two polls.

        `observe(active, kv_tokens, seconds)` hears what a token took while that load was there. `leads`: whether this
        process polls, and not another of its host, see `SharedCounts.leads`.
        """
        self._fleet = fleet
        self._fetch = fetch
        self._clock = clock
        self._replicas = replicas
        self._observe = observe
        self._leads = leads
        self._config = fleet.config
        self._seen: dict[Target, _Seen] = {}
        self.rounds = Rounds(fleet, self.ask, self._pause_s, clock)
        fleet.subscribe(self._forget)

    async def ask(self, engine: Engine) -> None:
        """Polls it once."""
        before = [target.own for target in engine.targets]
        page = b""
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                status, page = await self._fetch(engine, self._config.poll_path, MAX_BYTES)
            if status != 200:
                page = b""
        except Exception as error:
            logger.debug("engine %s: no metrics: %r", engine.id, error)
        if not page:
            _FAILED.inc()
        for target, own, reading in zip(engine.targets, before, read_metrics(page, len(engine.targets)), strict=True):
            if reading.active is None:
                self._stale(target)
            else:
                self._see(target, own, reading)
        if self._fleet.touched is not None:
            self._fleet.touched.update(engine.targets)
        self._fleet.loads_changed()

    def _see(self, target: Target, before: Load, reading: Reading) -> None:
        now = self._clock()
        last = self._seen.get(target)
        # What was learnt, and not told by the configuration, may be other after a restart of the engine.
        if target.capacity_tokens is None or (last is not None and target.capacity_tokens == last.learnt_tokens):
            target.capacity_tokens = reading.capacity_tokens or target.capacity_tokens
        learnt, reading.capacity_tokens = reading.capacity_tokens, target.capacity_tokens
        strangers = self._strangers(target, before, reading)
        seen = self._seen.setdefault(target, _Seen(now, strangers))
        seen.polled_at = now
        seen.learnt_tokens = learnt
        # Alone, strangers are few and a request that has just ended looks like one: they count when seen twice.
        target.see_strangers(strangers if self._replicas > 1 else _least(strangers, seen.strangers))
        seen.strangers = strangers
        self._check_progress(target, seen, reading)
        self._tell(seen.reading, reading)
        seen.reading = reading

    def _strangers(self, target: Target, before: Load, reading: Reading) -> Load:
        own, peers = target.own, target.peers
        # The engine counted at some moment between the question and its answer.
        active = max(0, (reading.active or 0) - max(own.active, before.active) - peers.active)
        there = reading.kv_tokens
        if there is None:
            return Load(active)
        held = [load.held_tokens + peers.held_tokens for load in (before, own)]
        target.shared_tokens = max(0, min(held) - there)
        beyond = max(0, there - max(held)) if active else 0
        return Load(active, beyond, 0.0, beyond)

    def _check_progress(self, target: Target, seen: _Seen, reading: Reading) -> None:
        last, now = seen.reading, seen.polled_at
        if not reading.active or not reading.steps or reading.steps != last.steps:
            seen.moved_at = now
        elif now - seen.moved_at > self._config.standstill_s:
            self._fleet.failed(target.engine, f"its counters stand still for {now - seen.moved_at:.0f} s")

    def _tell(self, last: Reading, reading: Reading) -> None:
        gaps, seconds = reading.gaps - last.gaps, reading.gap_seconds - last.gap_seconds
        if self._observe is not None and last.gaps and gaps > 0 and seconds > 0 and reading.kv_tokens is not None:
            self._observe(reading.running or 0, reading.kv_tokens, seconds / gaps)

    def _stale(self, target: Target) -> None:
        """No news of it: among several routers it passes for as loaded as the most loaded that there is news of."""
        now = self._clock()
        seen = self._seen.get(target)
        if seen is not None and now - seen.polled_at <= self._config.stale_s:
            return
        own_and_peers = target.active - target.strangers.active, target.kv_tokens - target.strangers.kv_tokens
        fresh = [
            other
            for other, of in self._seen.items()
            if other is not target and now - of.polled_at <= self._config.stale_s and self._known(other)
        ]
        if self._replicas == 1 or not fresh:
            target.see_strangers(NOTHING)
            return
        active = max(0, max(other.active for other in fresh) - own_and_peers[0])
        kv_tokens = max(0, max(other.kv_tokens for other in fresh) - own_and_peers[1])
        target.see_strangers(Load(active, kv_tokens, 0.0, kv_tokens))

    def _known(self, target: Target) -> bool:
        return self._fleet.engines.get(target.engine.id) is target.engine

    def _forget(self) -> None:
        if len(self._seen) > sum(len(engine.targets) for engine in self._fleet.engines.values()):
            self._seen = {target: seen for target, seen in self._seen.items() if self._known(target)}

    def _pause_s(self, engine: Engine) -> float:
        if engine.state in _SILENT or not self._leads():
            return inf
        usual_s = _POLL_S if self._replicas == 1 else _POLL_AMONG_REPLICAS_S
        return self._config.poll_s or max(usual_s, len(self._fleet.engines) / _POLLS_A_SECOND)


def _least(first: Load, second: Load) -> Load:
    return Load(
        min(first.active, second.active),
        min(first.kv_tokens, second.kv_tokens),
        0.0,
        min(first.held_tokens, second.held_tokens),
    )
