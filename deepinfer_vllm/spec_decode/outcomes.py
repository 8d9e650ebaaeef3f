"""Corrects chances by what became of drafts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_KEPT = 4000.0  # drafts of a position that its correction remembers
_PRIOR = 20.0  # informative drafts that its start counts as
_MOST = 4.0  # of a correction, in logits


class Outcomes:
    """For each position a shift of the logit, the one at which as many drafts were accepted as expected.

    It is a logistic regression of one intercept, by Newton steps over a fading memory. It mends confidences that are
    all too high or too low; what tells good drafts from bad ones is the calibration's. A shift for a position never
    reverses the order of its drafts. One thread.
    """

    def __init__(self) -> None:
        self._odds = np.ones(0)
        """[S]: what odds are multiplied by."""
        self._shift = np.zeros(0)
        self._information = np.zeros(0)

    def corrected(self, chances: NDArray[np.floating]) -> NDArray[np.floating]:
        """[R, S] from [R, S]."""
        if not len(self._odds):
            return chances
        raised = chances * self._odds
        return raised / (1.0 - chances + raised)

    def saw(self, chances: NDArray[np.floating], drafts: NDArray[np.integer], accepted: NDArray[np.integer]) -> None:
        """chances: [R, S], not yet corrected; drafts: [R], verified; accepted: [R], the first of these."""
        positions = chances.shape[1]
        if not len(self._odds):
            self._odds, self._shift, self._information = np.ones(positions), np.zeros(positions), np.zeros(positions)
        steps = np.arange(positions)
        tried = (steps < drafts[:, None]) & (steps <= accepted[:, None])
        expected = np.where(tried, np.fmin(np.fmax(self.corrected(chances), 1e-3), 1.0 - 1e-3), 0.0)
        informative = (expected * (1.0 - expected)).sum(axis=0)
        missed = (tried & (steps < accepted[:, None])).sum(axis=0) - expected.sum(axis=0)
        fades = 1.0 - np.minimum(tried.sum(axis=0) / _KEPT, 0.5)
        self._information = self._information * fades + informative
        step = missed / (self._information + _PRIOR)
        self._shift = np.clip(self._shift + np.clip(step, -1.0, 1.0), -_MOST, _MOST)
        self._odds = np.exp(self._shift)
