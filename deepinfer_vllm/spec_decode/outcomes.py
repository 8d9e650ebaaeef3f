"""Corrects chances by what became of drafts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.calibration import scaled

_KEPT = 4000.0  # drafts of a position that its correction remembers
_PRIOR = 20.0  # informative drafts that no correction counts as
_ENOUGH = 64  # drafts a step that are learnt from; of more every so many
_MOST = 0.5  # of a step of either coefficient
_FARTHEST = 4.0  # of a shift


class Outcomes:
    """A logistic regression for each position, of whether a draft is accepted on the logit of its chance.

    Newton steps over a fading memory, from slope 1 and shift 0: confidences that are too sure or not sure enough are
    mended while the engine runs, with or without a calibration. Slopes stay positive, so the order of a position's
    drafts stays. One thread.
    """

    def __init__(self) -> None:
        self._slope, self._shift = np.ones(0), np.zeros(0)
        """[S]: what logits are multiplied by, and what is added."""
        self._information = np.zeros((0, 3))
        """[S, 3]: of shift, of both, of slope."""
        self._skipped = 0

    def corrected(
        self, chances: NDArray[np.floating], temperatures: NDArray[np.floating] | None = None
    ) -> NDArray[np.floating]:
        """[R, S] from [R, S], which first are scaled by these temperatures [S], in one go: both multiply logits."""
        if not len(self._slope):
            return chances if temperatures is None else scaled(chances, temperatures)
        said = np.asarray(chances, np.float32)  # logarithms take a third of the time that float64's do
        slope = self._slope if temperatures is None else self._slope / temperatures
        with np.errstate(divide="ignore", over="ignore"):  # chances of 0 and 1 have infinite logits, and stay
            logits = np.log(said / (1 - said)) * slope.astype(np.float32)
            return 1 / (1 + np.exp(-np.clip(self._shift, -_FARTHEST, _FARTHEST).astype(np.float32) - logits))

    def saw(self, chances: NDArray[np.floating], drafts: NDArray[np.integer], accepted: NDArray[np.integer]) -> None:
        """chances: [R, S], not yet corrected; drafts: [R], verified; accepted: [R], the first of these."""
        requests, positions = chances.shape
        every = max(1, requests // _ENOUGH)
        self._skipped += 1
        if self._skipped % every:
            return
        if not len(self._slope):
            self._slope, self._shift = np.ones(positions), np.zeros(positions)
            self._information = np.zeros((positions, 3))
        chances = np.fmin(np.fmax(chances, 1e-4), 1.0 - 1e-4)
        steps = np.arange(positions)
        tried = (steps < drafts[:, None]) & (steps <= accepted[:, None])
        logits = np.log(chances / (1.0 - chances))
        expected = self.corrected(chances)
        weight = np.where(tried, expected * (1.0 - expected), 0.0)
        missed = np.where(tried, (steps < accepted[:, None]) - expected, 0.0)
        by_logit = weight * logits
        news = np.stack([weight.sum(axis=0), by_logit.sum(axis=0), (by_logit * logits).sum(axis=0)], axis=1)
        fades = 1.0 - np.minimum(every * tried.sum(axis=0) / _KEPT, 0.5)
        self._information = self._information * fades[:, None] + news
        of_shift, of_both, of_slope = (self._information + (_PRIOR, 0.0, _PRIOR)).T
        pull, turn = missed.sum(axis=0), (missed * logits).sum(axis=0)
        scale = of_shift * of_slope - of_both**2
        self._shift = self._shift + np.clip((of_slope * pull - of_both * turn) / scale, -_MOST, _MOST)
        self._slope = np.clip(self._slope + np.clip((of_shift * turn - of_both * pull) / scale, -_MOST, _MOST), 0.1, 10)
