"""Which engines serve which context lengths: by recent demand, with hysteresis."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from deepinfer_router.engine_state import GETS_WORK, EngineState
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_router.shares import blocks, shares, whole
from deepinfer_router.target import Engine
from deepinfer_router.work import Work

_BEGINS, _ENDS = 0.05, 0.02
"""A group has demand once it is worth this many engines, and has none below the second: hysteresis."""


_IDLE = 0.1
"""Below this part of what the engines can do all stays as it is: a quiet night says nothing about the morning."""
_FOLLOWED_EPOCHS = 3
"""After so long without word from whom it followed a worker decides for itself."""


@dataclass(slots=True, eq=False)
class _Member:
    engine: Engine
    group: int
    moved_at: float = -inf

    @property
    def backlog_s(self) -> float:
        return sum(target.pending_seconds - target.running_seconds for target in self.engine.targets)


class Pools:
    """Engines of one fleet and the group that each is in. An engine moves whole, all its ranks, and a move is only a
    change of its label: what it has, it finishes.

    Without state of time: `now` is passed in, in seconds of any steady clock. One thread.
    """

    def __init__(self, config: PrefillConfig, grouped: bool = True) -> None:
        """Not `grouped`: demand is measured by group, and all engines serve all."""
        self._config = config
        self._grouped = grouped
        self._epoch_s = config.epoch_s
        self._edges = config.edges_tokens if config.pools else ()
        count = len(self._edges) + 1
        self.demand = [0.0] * count
        """Smoothed seconds of work that arrive or wait, a second, by group."""
        self.moves = 0
        """Engines moved since the start, the first cut not counted."""
        self.frozen = False
        self._home = [0] * count  # of each group, the group in whose engines it runs
        self._active = [False] * count
        self._spent = [0.0] * count
        self._requests = 0
        self._cut = False
        self._members: dict[str, _Member] = {}
        self._epoch_at: float | None = None
        self._followed_at = -inf

    def group(self, prompt_tokens: int) -> int:
        """Number of the group of a prompt so long, from 0 for the shortest."""
        return bisect_right(self._edges, prompt_tokens)

    def know(self, engine: Engine) -> int:
        """The group that an engine is in. A new one joins where most are missing; one that is back is where it was."""
        member = self._members.get(engine.id)
        if member is None:
            member = self._members[engine.id] = _Member(engine, self._neediest())
        elif member.engine is not engine:
            member.engine = engine
        return member.group

    def home(self, group: int) -> int:
        """The group whose engines serve `group`: itself, or one that it shares them with."""
        return self._home[group]

    def observe(self, work: Work, seconds: float, now: float) -> bool:
        """A request came that needs `seconds` of prefill. Once a request, when it comes and not when it is served.

        Whether the epoch is over, which `update` ends.
        """
        if self._epoch_at is None:
            self._epoch_at = now
        self._spent[bisect_right(self._edges, work.prompt_tokens)] += seconds
        self._requests += 1
        return now - self._epoch_at >= self._epoch_s

    def update(self, now: float) -> bool:
        """Ends the epoch if it is over: measures demand and moves engines. Whether anything changed. O(engines)."""
        config = self._config
        if self._epoch_at is None or now - self._epoch_at < self._epoch_s or len(self._edges) == 0:
            return False
        self._measure(now - self._epoch_at)
        self._epoch_at = now
        for id in [id for id, member in self._members.items() if member.engine.state is EngineState.GONE]:
            del self._members[id]
        able = self._able()
        ill = len(self._members) - len(able)
        if now - self._followed_at < _FOLLOWED_EPOCHS * config.epoch_s:
            return False
        self.frozen = ill > config.freeze_unhealthy_fraction * len(self._members)
        ranks = sum(len(member.engine.targets) for member in able)
        if (
            self.frozen
            or not self._grouped
            or self._requests < config.first_cut_requests
            or sum(self.demand) <= _IDLE * ranks
        ):
            return False
        before = [member.group for member in self._members.values()], list(self._home)
        self._partition(len(able))
        if self._cut:
            self._move(able, now)
        else:
            self._cut_first()
        return before != ([member.group for member in self._members.values()], self._home)

    def engines_of(self, group: int) -> list[Engine]:
        """Engines that serve `group` and get work: its own, else those of the next longer group that has some, else of
        the next shorter. Empty only if none gets work."""
        able = self._able()
        if not able:
            return []
        home = self._home[group]
        nearest = min((member.group for member in able), key=lambda g: (g < home, abs(g - home)))
        return [member.engine for member in able if member.group == nearest]

    def cut(self) -> dict[str, Any] | None:
        """Who serves what, of plain types, for another worker to `follow`; None before the first cut."""
        if not self._cut:
            return None
        return {"homes": list(self._home), "groups": {id: member.group for id, member in self._members.items()}}

    def follow(self, cut: dict[str, Any], now: float) -> bool:
        """Does as another worker has decided, and moves nothing itself for a while. Whether anything changed.

        Workers that moved engines each for itself would undo each other's groups.
        """
        homes, groups = cut["homes"], cut["groups"]
        if len(homes) != len(self._home) or not all(0 <= g < len(homes) for g in (*homes, *groups.values())):
            return False
        self._followed_at, self._cut = now, True
        before = [member.group for member in self._members.values()], self._home
        self._home = list(homes)
        for id, member in self._members.items():
            member.group = groups.get(id, self._home[member.group])
        return before != ([member.group for member in self._members.values()], self._home)

    def counts(self) -> list[int]:
        """Engines that get work, by group."""
        return self._count(self._able())

    def _able(self) -> list[_Member]:
        return [member for member in self._members.values() if member.engine.state in GETS_WORK]

    def _count(self, members: Iterable[_Member]) -> list[int]:
        counts = [0] * len(self.demand)
        for member in members:
            counts[member.group] += 1
        return counts

    def _measure(self, elapsed_s: float) -> None:
        config = self._config
        weight = 1.0 - (1.0 - config.demand_smoothing) ** (elapsed_s / config.epoch_s)
        rates = [spent / elapsed_s for spent in self._spent]
        for member in self._members.values():  # a group's queue is demand too, shared by those that have it in common
            sharers = [g for g, home in enumerate(self._home) if home == member.group] or [member.group]
            total = sum(rates[g] for g in sharers)
            for g in sharers:
                part = rates[g] / total if total > 0 else 1.0 / len(sharers)
                rates[g] += part * member.backlog_s / config.epoch_s
        if not self._cut:
            weight = 1.0
        self.demand = [old + weight * (rate - old) for old, rate in zip(self.demand, rates, strict=True)]
        self._spent = [0.0] * len(self._spent)

    def _partition(self, engines: int) -> None:
        total = sum(self.demand)
        for g, demand in enumerate(self.demand):
            worth = engines * demand / total if total > 0 else 0.0
            self._active[g] = worth > (_ENDS if self._active[g] else _BEGINS)
        for block in blocks(self._active, self.demand, engines):
            first = next((g for g in block if self._active[g]), block[0])
            for g in block:
                self._home[g] = first
        for member in self._members.values():
            member.group = self._home[member.group]

    def _wanted(self, engines: int) -> dict[int, float]:
        """How many of them each group with engines of its own should have."""
        homes = sorted(set(self._home))
        demand = [sum(d for d, home in zip(self.demand, self._home, strict=True) if home == g) for g in homes]
        return dict(zip(homes, shares(demand, max(len(homes), engines)), strict=True))

    def _cut_first(self) -> None:
        wanted = self._wanted(len(self._members))
        labels = [g for g, n in zip(wanted, whole(list(wanted.values())), strict=True) for _ in range(n)]
        for member, label in zip(sorted(self._members.values(), key=lambda m: m.engine.id), labels, strict=True):
            member.group = label
        self._cut = True

    def _move(self, able: list[_Member], now: float) -> None:
        config = self._config
        wanted, counts = self._wanted(len(able)), self._count(able)
        dwell_s = config.dwell_epochs * config.epoch_s
        for _ in range(max(2, ceil(config.max_moved_fraction * len(able)))):
            short = max(wanted, key=lambda g: (counts[g] == 0, wanted[g] - counts[g]))
            stranded = counts[short] == 0
            if not stranded and wanted[short] - counts[short] <= config.dead_band_engines:
                return
            movable = [
                member
                for member in able
                if counts[member.group] > 1
                and (stranded or now - member.moved_at >= dwell_s)
                and (stranded or wanted[member.group] - counts[member.group] < -config.dead_band_engines)
            ]
            if not movable:
                return
            member = min(movable, key=lambda m: (wanted[m.group] - counts[m.group], m.backlog_s, m.engine.id))
            counts[member.group] -= 1
            counts[short] += 1
            member.group, member.moved_at = short, now
            self.moves += 1

    def _neediest(self) -> int:
        if not self._cut:
            return 0
        able = self._able()
        wanted, counts = self._wanted(len(able) + 1), self._count(able)
        return max(wanted, key=lambda g: (counts[g] == 0, wanted[g] - counts[g], -g))
