"""Picks the engine and rank that prefills a request: by context length, then least predicted finish time."""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from math import inf
from random import Random
from typing import Any, NamedTuple

from deepinfer_router.engine_costs import EngineCosts
from deepinfer_router.pick import Pick
from deepinfer_router.pools import Pools
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_router.roles import Role
from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work

_MAX_VIEWS = 64


class _Sides(NamedTuple):
    """Targets as one group sees them."""

    own: list[Target]
    above: list[Target]
    """In longer groups than its own engines."""
    below: list[Target]


class _View:
    """One list of targets, sorted for each group when first asked."""

    __slots__ = ("_places", "_sides", "one_kind", "pools", "targets", "version")

    def __init__(self, targets: Sequence[Target], places: list[tuple[Pools, int]], version: int) -> None:
        """`places`: of each target its pool, and its group there."""
        self.targets = targets
        self.version = version
        self.one_kind = len({target.engine.kind for target in targets}) == 1
        self._places = places
        self.pools = list({id(pool): pool for pool, _ in places}.values())
        self._sides: dict[int, _Sides] = {}

    def sides(self, group: int) -> _Sides:
        """Own are those of the group, if none is there those of the next longer, else of the next shorter."""
        sides = self._sides.get(group)
        if sides is None:
            distances = [own - pool.home(group) for pool, own in self._places]
            home = min(distances, key=lambda distance: (distance < 0, abs(distance)))
            sides = self._sides[group] = _Sides([], [], [])
            for target, distance in zip(self.targets, distances, strict=True):
                (sides.own if distance == home else sides.above if distance > home else sides.below).append(target)
        return sides


def _means(targets: Sequence[Target]) -> tuple[float, float]:
    """Of their pending seconds and their KV tokens."""
    seconds, tokens = 0.0, 0
    for target in targets:
        seconds += target.pending_seconds
        tokens += target.kv_tokens
    return seconds / len(targets), tokens / len(targets)


class PrefillPolicy:
    """Groups engines by context length and picks within the group. Deterministic given its calls. One thread.

    For each request: `arrive` once, which also says its cost; `pick` as often as it has to be placed.
    """

    def __init__(self, config: PrefillConfig, costs: EngineCosts, slow_start_s: float = 30.0) -> None:
        """`slow_start_s`: how long the share of a new engine grows, as in section `fleet`."""
        self.costs = costs
        self.pools: dict[tuple[tuple[str, ...], bool], Pools] = {}
        """By the models that engines serve, for those of other models cannot help out, and whether they have groups."""
        self.arrived_seconds = 0.0
        """Predicted seconds of all that has arrived."""
        self.arrived_tokens = 0
        """Uncached tokens of all that has arrived."""
        self._config = config
        self._edges = config.edges_tokens if config.pools else ()
        self.groups = config.group_names
        """Their names, from the shortest."""
        self._slow_start_s = slow_start_s
        self._overflow_wait_s = config.overflow_wait_s
        self._max_pending_s = inf if config.max_pending_s is None else config.max_pending_s
        self._choices = config.choices
        self._views: dict[int, _View] = {}
        self._last = _View((), [], 0)
        self._version = 0

    def arrive(self, work: Work, targets: Sequence[Target], now: float) -> float:
        """A request came, which one of `targets` will prefill: counts it as demand and returns its predicted seconds (0
        without targets). Each request once, before it waits for admission. When an epoch is over, engines are moved.
        """
        if not targets:
            return 0.0
        q, c = work.prompt_tokens - work.hit_tokens, work.hit_tokens
        if q < 1:
            q, c = 1, max(0, work.prompt_tokens - 1)
        seconds = self.costs.of(targets[0].engine.kind).seconds(q, c)
        self.arrived_seconds += seconds
        self.arrived_tokens += q
        for pool in self._view(targets).pools:
            if pool.observe(work, seconds, now) and pool.update(now):
                self._version += 1
        return seconds

    def lane(self, work: Work) -> Hashable:
        """The same for works that need the same engines: those of one model and group."""
        return work.model, bisect_right(self._edges, work.prompt_tokens)

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        """The target of least predicted finish time: of the prompt's group, if none elsewhere is much sooner.

        `targets`: those that can be sent to; the same object as long as they stay the same, since what is derived from
        it is kept. `work.excluded` are not picked. None if there is nothing to pick from or all have enough to do: that
        is asked of no request that has failed before, as it must not wait again. O(targets).
        """
        if not targets:
            return None
        view = self._view(targets)
        q, c = work.prompt_tokens - work.hit_tokens, work.hit_tokens
        if q < 1:
            q, c = 1, max(0, work.prompt_tokens - 1)
        if view.one_kind:
            kinds = None
            seconds = self.costs.of(targets[0].engine.kind).seconds(q, c)
        else:
            kinds = {kind: self.costs.of(kind).seconds(q, c) for kind in {target.engine.kind for target in targets}}
            seconds = min(kinds.values())
        group = bisect_right(self._edges, work.prompt_tokens)
        own, above, below = view.sides(group)
        target = self._least(own, work.excluded, kinds, now, rng)
        reason = "in_group"
        if target is None:
            target, reason = self._least(targets, work.excluded, kinds, now, rng), "excluded"
            if target is None:
                return None
        elif target.pending_seconds > self._overflow_wait_s and (left := target.prefill_left(now)) > max(
            self._overflow_wait_s, 2.0 * seconds
        ):
            if other := self._sooner(target, left, above, work, kinds, now, rng):
                target, reason = other, "overflow_up"
            elif other := self._idle(below, work, rng):
                target, reason = other, "overflow_idle"
        left = target.prefill_left(now)
        if kinds is not None:
            seconds = kinds[target.engine.kind]
        if left > self._max_pending_s and left > seconds and not work.excluded:
            return None
        return Pick(target, reason, left + seconds, self.groups[group], seconds)

    def served(self, pick: Pick, work: Work, seconds: float, now: float) -> None:
        """The first byte of what `pick` was for came `seconds` after it was sent: what the costs are fitted to.

        Not of answers that come whole, after their decode.
        """
        q = work.uncached_tokens
        waited_s = pick.predicted_seconds - pick.cost_seconds
        self.costs.observe(pick.target.engine.kind, q, max(0, work.prompt_tokens - q), waited_s, seconds, now)

    def pool(self, engine: Engine) -> Pools:
        """Where an engine belongs."""
        grouped = self._config.pools_where_decoding or Role.DECODE not in engine.roles
        pool = self.pools.get((engine.models, grouped))
        if pool is None:
            pool = self.pools[engine.models, grouped] = Pools(self._config, grouped)
        return pool

    def cuts(self) -> list[dict[str, Any]]:
        """Which engines serve what, of plain types: what another worker is to `follow`."""
        return [{"models": list(models)} | cut for (models, _), pool in self.pools.items() if (cut := pool.cut())]

    def follow(self, cuts: Iterable[dict[str, Any]], now: float) -> None:
        """Does as another worker has decided."""
        for cut in cuts:
            pool = self.pools.setdefault((tuple(cut["models"]), True), Pools(self._config))
            if pool.follow(cut, now):
                self._version += 1

    def _view(self, targets: Sequence[Target]) -> _View:
        last = self._last
        if last.targets is targets and last.version == self._version:
            return last
        view = self._views.get(id(targets))
        if view is not None and view.version == self._version and view.targets is targets:
            self._last = view
            return view
        places = []
        for target in targets:
            engine = target.engine
            pool = self.pool(engine)
            places.append((pool, pool.know(engine)))
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        view = self._views[id(targets)] = _View(targets, places, self._version)
        return view

    def _least(
        self,
        targets: Sequence[Target],
        excluded: Sequence[str],
        kinds: dict[str, float] | None,
        now: float,
        rng: Random,
    ) -> Target | None:
        """The one of least pending seconds (and own cost, where kinds differ); of equal ones that with the fewest KV
        tokens: engines without a queue for prefill differ by what they decode. The rest by chance."""
        choices = self._choices
        if choices and len(targets) > choices:
            if excluded:
                targets = [target for target in targets if target.engine.id not in excluded]
            targets = rng.sample(targets, min(choices, len(targets)))
        best, least, fewest = None, inf, inf
        ties = 1
        mean_s = mean_held = -1.0
        for target in targets:
            finish, held = target.pending_seconds, target.kv_tokens
            if finish:
                finish = target.prefill_left(now)
            if kinds is not None:
                finish += kinds[target.engine.kind]
            if finish > least or (finish == least and held > fewest) or (excluded and target.engine.id in excluded):
                continue
            if target.uncertain_until > now:  # as if it had its part of what the others have, shrinking to nothing
                part = min(1.0, (target.uncertain_until - now) / self._slow_start_s)
                if mean_s < 0:
                    mean_s, mean_held = _means(targets)
                finish += part * mean_s
                held += round(part * mean_held)
                if finish > least or (finish == least and held > fewest):
                    continue
            if finish == least and held == fewest:
                ties += 1
                if rng.random() * ties >= 1.0:  # each of them is as likely
                    continue
            else:
                ties = 1
            best, least, fewest = target, finish, held
        return best

    def _sooner(
        self,
        own: Target,
        left: float,
        above: Sequence[Target],
        work: Work,
        kinds: dict[str, float] | None,
        now: float,
        rng: Random,
    ) -> Target | None:
        """A target of a longer group that finishes it so much sooner that it may go there."""
        if self._config.overflow == "none" or not above:
            return None
        other = self._least(above, work.excluded, kinds, now, rng)
        if other is None or (its := other.prefill_left(now)) > self._config.overflow_gain * left:
            return None
        if kinds is not None and its + kinds[other.engine.kind] >= left + kinds[own.engine.kind]:
            return None
        return other

    def _idle(self, below: Sequence[Target], work: Work, rng: Random) -> Target | None:
        """A target of a shorter group, if two engines there have nothing to prefill, on any rank: one is left for those
        whose group it is, which would else wait for a long prompt."""
        if self._config.overflow != "up_and_idle" or not below:
            return None
        by_group: dict[int, dict[Engine, list[Target]]] = {}
        for target in below:
            engine = target.engine
            if target.pending_seconds <= 0.0 and all(rank.pending_seconds <= 0.0 for rank in engine.targets):
                by_group.setdefault(self.pool(engine).know(engine), {}).setdefault(engine, []).append(target)
        idle = [
            target
            for engines in by_group.values()
            if len(engines) > 1
            for engine, ranks in engines.items()
            if engine.id not in work.excluded
            for target in ranks
        ]
        return idle[int(rng.random() * len(idle))] if idle else None
