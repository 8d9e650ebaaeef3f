"""Fits the coefficients of cost(q, c) to observed seconds, while they come in."""

from collections import deque
from collections.abc import Sequence
from itertools import chain

from deepinfer_costmodel.cost import MAX_TOKENS, Cost, attended, clipped
from deepinfer_costmodel.robust import fitted

MAX_SECONDS = 3600.0
"""An observation of more is an error of whoever measured."""

_LEAST = 8  # observations before the prior is touched
_EVERY = 128
_RECENT = 256
_KEPT = 16  # older ones of each size
_HALF_LIFE = 512  # observations until one weighs half
_FORGOTTEN = 8 * _HALF_LIFE
_ANCHORS = [(q, c) for q in (256, 4096, 32_768, 262_144) for c in (0, 16_384, 262_144)]


class OnlineFit:
    """Robust, bounded, non-negative least squares of relative errors, over recent observations of all sizes.

    Beside the last 256, a few older ones of each size of q and c are kept, so that many short prompts do not push out
    the few long ones that tell the quadratic term; older ones weigh less. Outliers lose their weight by Tukey's
    bisquare, as the waiting that an observation may contain is not the engine's. What the observations leave open the
    prior's shape decides: scaled to what was seen, it counts as a dozen weak observations from 256 to 262,144 tokens,
    so that nothing far from what was seen follows from noise. `observe` takes a microsecond, and one in 128 a
    few milliseconds. One thread.
    """

    def __init__(self, prior: Cost) -> None:
        """`prior`: what holds until something is known; with its `cap_tokens`, which are the model's and not fitted."""
        self.prior = prior
        self.cost = prior
        self.observations = 0
        """Accepted since the start."""
        self.rejected = 0
        """Those that no engine can have taken."""
        self._due = _LEAST
        self._recent: deque[tuple[int, int, int, float]] = deque()
        self._kept: dict[tuple[int, int], deque[tuple[int, int, int, float]]] = {}
        """Older ones, by size."""
        self._errors: deque[float] = deque(maxlen=64)
        self._anchors = self._features(*zip(*_ANCHORS, strict=True))

    @property
    def error(self) -> float | None:
        """Median of |predicted - observed| / observed of the last 64, predicted before they were used; else None."""
        return sorted(self._errors)[len(self._errors) // 2] if self._errors else None

    def observe(self, q: int, c: int, seconds: float) -> bool:
        """q >= 1 new tokens behind c cached ones took `seconds`. False, and only counted, if that cannot be."""
        if not (1 <= q <= MAX_TOKENS and 0 <= c <= MAX_TOKENS and 0.0 < seconds <= MAX_SECONDS):
            self.rejected += 1
            return False
        self.observations += 1
        self._errors.append(abs(self.cost.seconds(q, c) - seconds) / seconds)
        if len(self._recent) == _RECENT:
            old = self._recent.popleft()
            size = old[1].bit_length() // 2, old[2].bit_length() // 4
            if size not in self._kept:
                self._kept[size] = deque(maxlen=_KEPT)
            self._kept[size].append(old)
        self._recent.append((self.observations, q, c, seconds))
        if self.observations >= self._due:
            self._due = self.observations + min(self.observations, _EVERY)
            self._refit()
        return True

    def _refit(self) -> None:
        for size, kept in list(self._kept.items()):
            while kept and self.observations - kept[0][0] > _FORGOTTEN:
                kept.popleft()
            if not kept:
                del self._kept[size]
        ages, news, behinds, seconds = zip(*self._recent, *chain(*self._kept.values()), strict=True)
        weights = [0.5 ** ((self.observations - age) / _HALF_LIFE) for age in ages]
        coefficients = fitted(self._features(news, behinds), seconds, weights, self._anchors, self._vector())
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
