"""Which target decodes a request."""

from collections.abc import Sequence
from random import Random

from deepinfer_router.decode_config import DecodeConfig
from deepinfer_router.pick import Pick
from deepinfer_router.slow_start import within_share
from deepinfer_router.target import Target
from deepinfer_router.work import Work


class DecodePolicy:
    """The least of `active + w * kv_tokens`, where there is room for what the request is expected to hold.

    That is a decode step's time up to what all targets have in common, a + b*active + c*kv_tokens with w = c/b. The
    default of w is b = 0.105 ms and c = 3.55e-8 s, a quarter of the step that vllm-project/router publishes for its
    program scheduling; anything from half to four times it balances nearly as well. Several routers that see each
    other late would all run to the same least target, and a scan of very many takes time: then the least of a few
    drawn at random. Ties are drawn. No I/O, no clock, no state but the weight.
    """

    def __init__(self, config: DecodeConfig | None = None, slow_start_s: float = 30.0) -> None:
        """`slow_start_s`: how long the share of a new engine grows, as in section `fleet`."""
        config = config or DecodeConfig()
        self.weigh(config.kv_weight)
        self._kv_share = config.kv_share
        self._scan_most = 0 if config.replicas > 1 else config.full_scan_most
        self._choices = config.choices
        self._slow_start_s = slow_start_s

    def weigh(self, kv_weight: float) -> None:
        """Sets w from now on."""
        # active/w + kv orders the same, in integers, which are quicker here; rounding 1/w is 5 % at most, at w = 0.1.
        self._per_request = max(1, round(1 / kv_weight))

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        """A target; None where none has room now, or all have failed this request. `now`: the clock's seconds."""
        sampled = self._choices < len(targets) > self._scan_most
        among = self._draw(targets, rng) if sampled else targets
        best = self._least(among, rng)
        if best is None:
            return None
        if best.uncertain_until <= now and not work.excluded and self._fits(best, work):
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

    def _draw(self, targets: Sequence[Target], rng: Random) -> list[Target]:
        count, random = len(targets), rng.random
        drawn: set[int] = set()
        while len(drawn) < self._choices:
            drawn.add(int(random() * count))
        return [targets[index] for index in drawn]

    def _fits(self, target: Target, work: Work) -> bool:
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
        fitting = [t for t in targets if t.engine.id not in excluded and self._fits(t, work)]
        able = within_share(fitting, now, self._slow_start_s)
        among = self._draw(able, rng) if sampled and len(able) > self._choices else able
        best = self._least(among, rng)
        if best is None:
            return None
        return Pick(best, "careful")
