"""Fits what steps take to observed seconds, while they come in."""

from collections.abc import Sequence

import numpy as np

from deepinfer_costmodel.cost import clipped
from deepinfer_costmodel.fit import MAX_SECONDS
from deepinfer_costmodel.huber import Floats, huber
from deepinfer_costmodel.recent import Recent
from deepinfer_costmodel.step import MOST_SECONDS, Load, StepCost

_EVERY = 64
_SURPRISE = 0.25  # of what was measured: farther off, the next fit comes sooner


class StepFit:
    """Bounded, non-negative coefficients of whole steps, over recent observations of all sizes (`Recent`).

    The prior's shape, scaled to what was seen, decides what observations leave open; the first one already sets the
    scale. `observe` takes some microseconds and `refit` a few milliseconds: call that where nobody
    waits, once it is due. One thread.
    """

    def __init__(self, prior: StepCost) -> None:
        """`prior`: what holds until something is known; with its `prefill.cap_tokens`, which are not fitted."""
        self.prior = prior
        self.cost = prior
        self.rejected = 0
        """Observations that no engine can have made."""
        self._recent = Recent()
        self._due = 1
        self._fitted = 0

    @property
    def observations(self) -> int:
        """Accepted since the start."""
        return self._recent.observations

    @property
    def error(self) -> float | None:
        """See `Recent.error`."""
        return self._recent.error

    @property
    def due(self) -> bool:
        """Whether enough has been observed since the last `refit`."""
        return self.observations >= self._due

    def observe(self, load: Load, seconds: float) -> bool:
        """A step took `seconds`. False, and only counted, if that cannot be."""
        if not 0.0 < seconds <= MAX_SECONDS:
            self.rejected += 1
            return False
        size = (
            load.tokens.bit_length() // 2,
            int(load.pairs).bit_length() // 4,
            load.decodes.bit_length() // 2,
            load.embeds > 0,
        )
        predicted = self.cost.seconds(load)
        self._recent.add(size, load, predicted, seconds)
        if abs(predicted - seconds) > _SURPRISE * seconds:
            self._due = min(self._due, self._fitted + 1 + self.observations // 16)
        return True

    def refit(self) -> None:
        """Fit to what has been observed, at least one step; `due` is False after it."""
        loads, seconds, weights = self._recent.observed()
        self._fitted = self.observations
        self._due = self._fitted + min(self._fitted, _EVERY)
        terms = huber(self._features(loads), np.asarray(seconds), np.asarray(weights), np.asarray(self._vector()))
        if terms is not None:
            self.cost = self._cost(terms)

    def _cost(self, terms: list[float]) -> StepCost:
        limits = zip(terms[:4], MOST_SECONDS.values(), strict=True)
        step, decode, context, embed = (min(term, limit) for term, limit in limits)
        chunk, beta, gamma, *index = terms[4:]
        prefill = clipped(step + chunk, beta, gamma, self.prior.prefill.cap_tokens, sum(index))
        return StepCost(prefill, min(step, prefill.alpha), decode, context, embed)

    def _vector(self) -> list[float]:
        prior, prefill = self.prior, self.prior.prefill
        terms = [prior.step, prior.decode, prior.context, prior.embed]
        terms += [prefill.alpha - prior.step, prefill.beta, prefill.gamma]
        return terms if prefill.cap_tokens is None else [*terms, prefill.index]

    def _features(self, loads: Sequence[Load]) -> Floats:
        """loads: [n]. Returns [7 or 8, n]: what each coefficient is multiplied by."""
        chunks, tokens, pairs, attended, decodes, context, embeds = np.array(loads, dtype=np.float64).T
        terms = [np.ones(len(loads)), decodes, context, embeds, chunks, tokens]
        return np.stack([*terms, pairs] if self.prior.prefill.cap_tokens is None else [*terms, attended, pairs])
