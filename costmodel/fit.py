"""Fits the coefficients of cost(q, c) to observed seconds, while they come in."""

from collections.abc import Sequence

from deepinfer_costmodel.cost import MAX_TOKENS, Cost, attended, clipped
from deepinfer_costmodel.recent import Recent
from deepinfer_costmodel.robust import fitted

MAX_SECONDS = 3600.0
"""An observation of more is an error of whoever measured."""

_LEAST = 8  # observations before the prior is touched
_EVERY = 128
_ANCHORS = [(q, c) for q in (256, 4096, 32_768, 262_144) for c in (0, 16_384, 262_144)]


class OnlineFit:
    """Robust, bounded, non-negative least squares of relative errors, over recent observations of all sizes.

    `Recent` says which are held and what they weigh. Outliers lose their weight by Tukey's
    bisquare, as the waiting that an observation may contain is not the engine's. What the observations leave open the
    prior's shape decides: scaled to what was seen, it counts as a dozen weak observations from 256 to 262,144 tokens,
    so that nothing far from what was seen follows from noise. `observe` takes a microsecond, and one in 128 a
    few milliseconds. One thread.
    """

    def __init__(self, prior: Cost) -> None:
        """`prior`: what holds until something is known; with its `cap_tokens`, which are the model's and not fitted."""
        self.prior = prior
        self.cost = prior
        self.rejected = 0
        """Those that no engine can have taken."""
        self._due = _LEAST
        self._recent = Recent()
        self._anchors = self._features(*zip(*_ANCHORS, strict=True))

    @property
    def observations(self) -> int:
        """Accepted since the start."""
        return self._recent.observations

    @property
    def error(self) -> float | None:
        """See `Recent.error`."""
        return self._recent.error

    def observe(self, q: int, c: int, seconds: float) -> bool:
        """q >= 1 new tokens behind c cached ones took `seconds`. False, and only counted, if that cannot be."""
        if not (1 <= q <= MAX_TOKENS and 0 <= c <= MAX_TOKENS and 0.0 < seconds <= MAX_SECONDS):
            self.rejected += 1
            return False
        size = q.bit_length() // 2, c.bit_length() // 4
        self._recent.add(size, (q, c), self.cost.seconds(q, c), seconds)
        if self.observations >= self._due:
            self._due = self.observations + min(self.observations, _EVERY)
            self._refit()
        return True

    def _refit(self) -> None:
        loads, seconds, weights = self._recent.observed()
        features = self._features(*zip(*loads, strict=True))
        coefficients = fitted(features, seconds, weights, self._anchors, self._vector())
        if coefficients is not None:
            self.cost = self._cost(coefficients)

    def _cost(self, terms: list[float]) -> Cost:
        alpha, beta, gamma = terms[:3]
        return clipped(alpha, beta, gamma, self.prior.cap_tokens, sum(terms[3:]))

    def _vector(self) -> list[float]:
        prior = self.prior
        terms = [prior.alpha, prior.beta, prior.gamma]
        return terms if prior.cap_tokens is None else [*terms, prior.index]

    def _features(self, news: Sequence[int], behinds: Sequence[int]) -> list[list[float]]:
        """news, behinds: [n], q and c. Returns [3 or 4][n]: what each coefficient is multiplied by."""
        cap = self.prior.cap_tokens
        pairs = [q * (c + 0.5 * q) for q, c in zip(news, behinds, strict=True)]
        terms = [[1.0] * len(news), list(map(float, news)), pairs]
        if cap is not None:
            terms.insert(2, [attended(q, c, cap) for q, c in zip(news, behinds, strict=True)])
        return terms
