"""Where a request goes: picks of the policies, booked."""

from collections.abc import Callable, Sequence
from random import Random

from deepinfer_router.decode import DecodePolicy
from deepinfer_router.fleet import Fleet
from deepinfer_router.lease import Lease
from deepinfer_router.metrics import Counter, counter
from deepinfer_router.pick import Pick
from deepinfer_router.prefill import PrefillPolicy
from deepinfer_router.roles import Role
from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work

_PREFILL, _DECODE = Role.PREFILL, Role.DECODE
Targets = Sequence[Target]

_PICKS = counter(
    "picks", "Engines chosen, by what for (decode, prefill, or whole requests) and why.", "stage", "reason"
)


class Shape:
    """What there is for a model: who prefills, who decodes, who does both. Made again when the fleet changes."""

    __slots__ = ("both", "decode", "epoch", "prefill", "split")

    def __init__(self, prefill: Targets, decode: Targets, epoch: int) -> None:
        """`epoch`: the fleet's, until which it is true."""
        self.epoch = epoch
        self.prefill = prefill
        self.decode = decode
        both = tuple(target for target in prefill if _DECODE in target.engine.roles)
        self.both: Targets = prefill if len(both) == len(prefill) else both
        """Those that do whole requests."""
        self.split = len(both) < len(prefill) or len(both) < len(decode)
        """Some engine prefills only, or decodes only."""


class Placed:
    """What a request holds of engines until it is over."""

    __slots__ = ("decode", "pick", "prefill")

    def __init__(self, decode: Lease, prefill: Lease | None, pick: Pick) -> None:
        self.decode = decode
        """Where its answer comes from; where it is computed whole, if `prefill` is None."""
        self.prefill = prefill
        self.pick = pick
        """Of the prefill, or of the whole."""

    def role_of(self, engine: Engine) -> Role:
        """What `engine` has to do of it; a whole request counts as a decode."""
        prefill = self.prefill
        return _PREFILL if prefill is not None and prefill.target.engine is engine else _DECODE

    def release(self, outcome: str) -> None:
        """Give back what is not given back yet."""
        if not self.decode.outcome:
            self.decode.release(outcome)
        if self.prefill is not None:
            self.prefill.release(outcome)


def give_back(placed: Placed) -> None:
    """Nobody took it."""
    placed.release("unused")


class Placer:
    """Asks the policies and books what they answer. The event loop's thread only; no await between pick and booking."""

    def __init__(
        self,
        fleet: Fleet,
        prefill: PrefillPolicy,
        decode: DecodePolicy,
        *,
        local_tokens: int,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        """`local_tokens`: a decode engine prefills so many uncached tokens itself."""
        self._fleet = fleet
        self._prefill = prefill
        self._decode = decode
        self._local_tokens = local_tokens
        self._clock = clock
        self._rng = rng
        self._shapes: dict[str, Shape] = {}
        self._whole_picks: dict[str, Counter] = {}

    def shape(self, model: str) -> Shape:
        """Engines that have room for work now."""
        fleet = self._fleet
        shape = self._shapes.get(model)
        if shape is not None and shape.epoch == fleet.epoch:
            return shape
        prefill, decode = fleet.targets(_PREFILL, model), fleet.targets(_DECODE, model)
        if shape is None or shape.prefill is not prefill or shape.decode is not decode:
            if len(self._shapes) > 1000:  # names that clients made up
                self._shapes.clear()
            shape = self._shapes[model] = Shape(prefill, decode, fleet.epoch)
        shape.epoch = fleet.epoch
        return shape

    def arrive(self, work: Work, shape: Shape, now: float) -> float:
        """Predicted seconds of its prefill. Once a request, before it is placed."""
        return self._prefill.arrive(work, shape.prefill if shape.split else shape.both, now)

    def served(self, pick: Pick, work: Work, seconds: float) -> None:
        """Its prefill took so long, from sending it to its first byte: what predictions learn from."""
        if pick.cost_seconds:  # else its decode engine computed it, of whose prefill nothing was predicted
            self._prefill.served(pick, work, seconds, self._clock())

    def place(self, work: Work, splits: bool) -> Placed | None:
        """Book a place for it; None where there is no room now. `splits`: two engines may share it."""
        shape = self.shape(work.model)
        now = self._clock()
        if not shape.split:
            return self._whole(work, shape.both, now)
        if splits and (work.uncached_tokens > self._local_tokens or not shape.decode):
            decode = self._decode.pick(work, shape.decode, now, self._rng)
            if decode is None:
                return None
            pick = self._prefill.pick(work, shape.prefill, now, self._rng)
            if pick is None and shape.prefill and not work.excluded:
                return None  # those that prefill have enough to do, and decoding must not pay for it
            if pick is not None and pick.target.engine is not decode.target.engine:
                kept = self._fleet.book(decode.target, work, _DECODE)
                _PICKS.labels("decode", decode.reason).inc()
                _PICKS.labels("prefill", pick.reason).inc()
                return Placed(kept, self._fleet.book(pick.target, work, _PREFILL, pick.cost_seconds), pick)
            return self._at(work, decode, pick.cost_seconds if pick is not None else 0.0)
        picked = self._decode.pick(work, shape.decode or shape.both, now, self._rng)
        return None if picked is None else self._at(work, picked, 0.0)

    def others(self, work: Work, roles: Sequence[Role]) -> bool:
        """Whether an engine with one of `roles` gets work and has not failed this one, with room now or later."""
        return any(engine.id not in work.excluded for role in roles for engine in self._fleet.at_work(role, work.model))

    def another_prefill(self, work: Work) -> tuple[Lease, Pick] | None:
        """A place for its prefill alone, with its decode's kept."""
        targets = self.shape(work.model).prefill
        pick = self._prefill.pick(work, targets, self._clock(), self._rng)
        if pick is None:
            return None
        _PICKS.labels("prefill", pick.reason).inc()
        return self._fleet.book(pick.target, work, _PREFILL, pick.cost_seconds), pick

    def any(self, work: Work) -> Placed | None:
        """A place for what needs no decoding: embeddings, lists of models. None where nobody is open for it, or all
        have failed it.

        It does not wait for prefills: where all have enough to do, the one with the least gets it.
        """
        shape, now = self.shape(work.model), self._clock()
        pick = self._prefill.pick(work, shape.prefill, now, self._rng)
        if pick is None and shape.prefill and not work.excluded:
            pick = Pick(min(shape.prefill, key=lambda target: target.prefill_left(now)), "full")
        if pick is None:
            pick = self._decode.pick(work, shape.decode, now, self._rng)
        if pick is None:
            return None
        return Placed(self._fleet.book(pick.target, work, _PREFILL, pick.cost_seconds), None, pick)

    def _whole(self, work: Work, targets: Targets, now: float) -> Placed | None:
        pick = self._prefill.pick(work, targets, now, self._rng)
        if pick is None:
            return None
        if not self._decode.fits(pick.target, work):
            other = self._decode.pick(work, targets, now, self._rng)
            if other is None:
                return None
            pick = pick._replace(target=other.target, reason="room")
        return self._at(work, pick, pick.cost_seconds)

    def _at(self, work: Work, pick: Pick, seconds: float) -> Placed:
        counted = self._whole_picks.get(pick.reason)
        if counted is None:
            counted = self._whole_picks[pick.reason] = _PICKS.labels("whole", pick.reason)
        counted.value += 1
        return Placed(self._fleet.book(pick.target, work, _DECODE, seconds), None, pick)
