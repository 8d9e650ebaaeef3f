"""What drafts that are not made yet can be expected to gain."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

_PARTS = 64
_EDGES: NDArray[np.float64] = np.arange(_PARTS + 1, dtype=np.float64)
_HALF_LIFE = 45  # steps


@cache
def _places(drafts: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Where the 0, 1/64, ... of so many drafts lie: whole drafts below, and the part of the next [65]."""
    at = _EDGES * (drafts / _PARTS)
    below = at.astype(np.int64)
    return below, at - below


@cache
def _numbers(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Numbers of drafts [65] from 0 to `count`, and where they lie among the 65 parts."""
    drafts: NDArray[np.int64] = np.arange(_PARTS + 1) * count // _PARTS
    at = drafts * (_PARTS / count)
    below = np.minimum(at.astype(np.int64), _PARTS)
    return drafts, below, at - below


class Expectation:
    """The recent distribution of survivals, of all positions together: mean cumulative sums of them, the highest first.

    A step weighs by its requests and fades with later steps. Nothing can be asked before something is `known`. One
    thread.
    """

    def __init__(self) -> None:
        self._positions = 0
        self._gained = np.zeros(_PARTS + 1)
        """[65]: survivors of a request among the best 0, 1/64, ... of its drafts."""
        self._weight = 0.0

    @property
    def known(self) -> bool:
        """Whether any draft was seen."""
        return self._positions > 0

    def saw(self, ranked: NDArray[np.floating], requests: int) -> None:
        """ranked: survivals of all drafts of so many requests, each with all its drafts, the highest first."""
        self.aged()
        self._positions = len(ranked) // requests
        self._weight += requests
        total = np.empty(len(ranked) + 1)
        total[0] = 0.0
        ranked.cumsum(dtype=np.float64, out=total[1:])
        below, part = _places(len(ranked))
        seen = total[below]
        seen += part * (total[np.minimum(below + 1, len(ranked))] - seen)
        self._gained += (seen / requests - self._gained) * (requests / self._weight)

    def aged(self) -> None:
        """A step has passed."""
        self._weight *= 0.5 ** (1.0 / _HALF_LIFE)

    def outdated(self) -> None:
        """Requests are others than those that were seen: the next step counts alone."""
        self._weight = 0.0

    def tokens(self, requests: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Numbers of drafts [65], rising from 0 to all, and the tokens [65] that a step would yield with each."""
        drafts, below, part = _numbers(requests * self._positions)
        gained = self._gained[below]
        gained += part * (self._gained[np.minimum(below + 1, _PARTS)] - gained)
        return drafts, requests + requests * gained

    def mixed(self, ranked: NDArray[np.floating]) -> NDArray[np.floating]:
        """[n]: survivals half way between a step's [n] and what is expected, the highest first.

        A later step's are closer to the mean than this one's.
        """
        gained = np.interp(np.linspace(0.0, _PARTS, len(ranked) + 1), _EDGES, self._gained)
        return (ranked + np.diff(gained) * (len(ranked) / self._positions)) / 2.0
