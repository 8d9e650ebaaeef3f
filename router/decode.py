"""Which target decodes a request."""

from collections.abc import Sequence
from random import Random

from deepinfer_router.decode_config import DecodeConfig
from deepinfer_router.pick import Pick
from deepinfer_router.slow_start import Shares, within_share
from deepinfer_router.target import Target
from deepinfer_router.work import Work

_DRAWN_BY_SIZE = 0.75
"""Exponent: 8 times the mean request is compared with 5 times as many targets. Of 0.5 to 1.25 the best balance in
simulation, with polls of 0.2 s and of 1 s."""

_SCAN_BY_WORKERS = 8
"""Workers that share counts still choose at the same moment: of more targets than this drawing balances better."""


class DecodePolicy:
    """The least of `active + w * kv_tokens`, where there is room for what the request is expected to hold.

    That is a decode step's time up to what all targets have in common, a + b*active + c*kv_tokens with w = c/b. The
    default of w is b = 0.105 ms and c = 3.55e-8 s, a quarter of the step that vllm-project/router publishes for its
    program scheduling; anything from half to four times it balances nearly as well. Several routers that see each
    other late would all run to the same least target, and a scan of very many takes time: then the least of a few
    drawn at random, of more for a request that is larger than most. Large ones are few, so that they seldom meet at
    the same target, and they are what an uneven step is made of. Ties are drawn. No I/O, no clock, no state but the
    weight.
    """

    def __init__(self, config: DecodeConfig | None = None, slow_start_s: float = 30.0, workers: int = 1) -> None:
        """`slow_start_s`: how long the share of a new engine grows, as in section `fleet`. `workers`: of this host."""
        config = config or DecodeConfig()
        self.weigh(config.kv_weight)
        self._kv_share = config.kv_share
        if config.replicas > 1:
            self._scan_most = 0
        else:
            self._scan_most = min(config.full_scan_most, _SCAN_BY_WORKERS) if workers > 1 else config.full_scan_most
        self._choices = config.choices
        self._slow_start_s = slow_start_s

    def weigh(self, kv_weight: float) -> None:
        """Sets w from now on."""
        # active/w + kv orders the same, in integers, which are quicker here; rounding 1/w is 5 % at most, at w = 0.1.
        self._per_request = max(1, round(1 / kv_weight))

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        """A target; None where none has room now, or all have failed this request. `now`: the clock's seconds."""
        sampled = self._choices < len(targets) > self._scan_most
        among = self._draw(work, targets, rng) if sampled else targets
        best = self._least(among, rng)
        if best is None:
            return None
        if (
            not work.excluded
            and self.fits(best, work)
            and (best.uncertain_until <= now or Shares(targets, now, self._slow_start_s).may_take(best))
        ):
            return Pick(best, "sampled" if sampled else "least")
        return self._careful(work, targets, sampled, now, rng)

    def _least(self, targets: Sequence[Target], rng: Random) -> Target | None:
        per_request = self._per_request
        least = 1 << 62
        ties: list[Target] = []
        for target in targets:
            score = target.active * per_request + target.kv_tokens
            if score <= least:
                if score < least:
                    least = score
                    ties = [target]
                else:
                    ties.append(target)
        if len(ties) > 1:
            return ties[int(rng.random() * len(ties))]
        return ties[0] if ties else None

    def _draw(self, work: Work, targets: Sequence[Target], rng: Random) -> list[Target]:
        """`choices` targets, and as many more as the request is larger than what those have on average."""
        count, random = len(targets), rng.random
        drawn: dict[int, Target] = {}
        wanted = self._choices
        active = kv_tokens = 0
        while len(drawn) < wanted:
            index = int(random() * count)
            drawn[index] = targets[index]
        for target in drawn.values():
            active += target.active
            kv_tokens += target.kv_tokens
        if kv_tokens > 0 and (larger := work.kv_tokens * active / kv_tokens) > 1.0:
            wanted = min(count // 2, round(wanted * larger**_DRAWN_BY_SIZE))
            while len(drawn) < wanted:
                index = int(random() * count)
                drawn[index] = targets[index]
        return list(drawn.values())

    def fits(self, target: Target, work: Work) -> bool:
        """Whether `target` has room for what the request is expected to hold."""
        # An empty engine is asked even for what is too large: it is the one to say so.
        capacity = target.capacity_tokens
        return (
            capacity is None
            or target.active <= 0
            or target.kv_tokens - min(target.shared_tokens, target.held_tokens) + work.kv_tokens
            <= capacity * self._kv_share
        )

    def _careful(self, work: Work, targets: Sequence[Target], sampled: bool, now: float, rng: Random) -> Pick | None:
        """With all that can speak against a target."""
        excluded = work.excluded
        fitting = [t for t in targets if t.engine.id not in excluded and self.fits(t, work)]
        able = within_share(fitting, now, self._slow_start_s)
        among = self._draw(work, able, rng) if sampled and len(able) > self._choices else able
        best = self._least(among, rng)
        if best is None:
            return None
        return Pick(best, "careful")
