"""How far calibrated confidences are from what happens now: the calibration error over the latest drafts."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.calibration_error import BINS, bin_of, error_of_sums

WINDOW_DRAFTS = 8192
TOLD_EVERY = 16
"""Steps between two errors that are told."""


class Drift:
    """Bin sums of the last `window` / 2 to `window` drafts, by position: fixed memory, a few numpy calls a step.

    The error is that of `calibration_error`, so that it can be held against what a calibration reported. Drafts cut by
    the budget count up to the cut, as in the fit. One thread.
    """

    def __init__(
        self, calibration: Calibration, window: int = WINDOW_DRAFTS, tell: Callable[[float], None] = lambda error: None
    ) -> None:
        """`tell` gets the error every `TOLD_EVERY` steps."""
        self._calibration, self._tell, self._steps = calibration, tell, 0
        self._positions = len(calibration.temperatures)
        self._half = max(1, window // 2)
        self._now, self._before = self._empty(), self._empty()
        self._drafts = 0

    def record(
        self,
        confidences: NDArray[np.floating],
        drafted: NDArray[np.integer],
        accepted: NDArray[np.integer],
        requests: Sequence[str] = (),
    ) -> None:
        """Raw confidences [R, S]; how many drafted tokens were verified and how many of these stood [R].

        What lies beyond `drafted` is not read. `requests`: as other listeners get them; it does not matter whose.
        """
        rows, positions = np.nonzero(np.arange(self._positions) < np.asarray(drafted)[:, None])
        if not len(rows):
            return
        survival = np.cumprod(self._calibration.apply(np.asarray(confidences, np.float64)), axis=1)
        predicted = survival[rows, positions]
        at = (positions, bin_of(predicted))
        np.add.at(self._now[0], at, 1.0)
        np.add.at(self._now[1], at, predicted)
        np.add.at(self._now[2], at, positions < np.asarray(accepted)[rows])
        self._drafts += int(np.count_nonzero(drafted))
        if self._drafts >= self._half:
            self._now, self._before, self._drafts = self._empty(), self._now, 0
        self._steps += 1
        if self._steps % TOLD_EVERY == 0 and (error := self.error) is not None:
            self._tell(error)

    @property
    def by_position(self) -> list[float]:
        """The error at each position; 0 where nothing was verified."""
        counts, predicted, happened = self._now + self._before
        return [error_of_sums(counts[k], predicted[k], happened[k]) for k in range(self._positions)]

    @property
    def error(self) -> float | None:
        """The mean over positions, each by how often it was verified; None before anything was."""
        outcomes = (self._now + self._before)[0].sum(axis=1)
        return float(np.average(self.by_position, weights=outcomes)) if outcomes.any() else None

    def _empty(self) -> NDArray[np.float64]:
        """Counts, sums of what was predicted and of what happened: [3, positions, bins]."""
        return np.zeros((3, self._positions, BINS))
