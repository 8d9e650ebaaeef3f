"""What drafts that are not made yet can be expected to gain."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_POINTS = 64
_HALF_LIFE = 45  # steps
_START = 8.0  # requests that the start's guess counts as
_GUESS = 0.8  # chance of each position before anything is known


class Expectation:
    """The recent distribution of survivals, of all positions together: [64] of them, the highest first.

    A request whose drafts were all scheduled counts; a step weighs by its requests and fades with later steps. One
    thread.
    """

    def __init__(self) -> None:
        self._positions = 0
        self._sorted = np.zeros(_POINTS)
        self._weight = _START

    @property
    def known(self) -> bool:
        """Whether drafts have been seen."""
        return self._positions > 0

    def saw(self, survival: NDArray[np.float64], scheduled: NDArray[np.integer]) -> None:
        """survival: [R, S], of drafts; scheduled: [R]."""
        requests, positions = survival.shape
        if not self._positions:
            self._positions = positions
            self._sorted = _resampled(np.repeat(_GUESS ** np.arange(1, positions + 1), _POINTS))
        whole = survival if scheduled.min() == positions else survival[scheduled == positions]
        if not len(whole):
            return
        self.aged()
        self._weight += len(whole)
        self._sorted += (_resampled(whole) - self._sorted) * (len(whole) / self._weight)

    def aged(self) -> None:
        """A step has passed."""
        self._weight *= 0.5 ** (1.0 / _HALF_LIFE)

    def tokens(self, requests: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Numbers of drafts [65], rising from 0 to all, and the tokens [65] that a step would yield with each."""
        count = requests * (self._positions or 1)
        drafts = np.rint(np.arange(_POINTS + 1) * (count / _POINTS)).astype(np.int64)
        gained = np.concatenate(([0.0], np.cumsum(self._sorted))) * (count / _POINTS)
        return drafts, requests + np.interp(drafts * (_POINTS / count), np.arange(_POINTS + 1), gained)


def _resampled(survival: NDArray[np.float64]) -> NDArray[np.float64]:
    """[64] means of equal parts of the sorted survivals."""
    falling = np.sort(survival, axis=None)[::-1]
    total = np.concatenate(([0.0], np.cumsum(falling)))
    edges = np.arange(_POINTS + 1) * (len(falling) / _POINTS)
    return np.diff(np.interp(edges, np.arange(len(total)), total)) * (_POINTS / len(falling))
