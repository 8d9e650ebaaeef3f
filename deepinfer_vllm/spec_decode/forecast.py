"""Which drafts will survive that are not drawn yet, by what earlier ones of the same request did."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

KNOWN_POSITIONS = 2
"""Of an earlier block, what may be looked at of its own request. Confidences of later positions follow from tokens that
may not have stood, and vLLM draws another in their place with the same noise: a decision by them would not be
independent of what is drawn."""
_KEPT = 0.5  # of a request's level, from block to block
_HALF_LIFE = 45  # steps that means and slopes remember
_PAUSE = 8  # and steps without blocks, in which texts go on unseen
_PRIOR = 8.0  # blocks' worth of doubt that a level says anything


class Forecast:
    """Survivals by position: the mean of all requests, and a line on the request's own level.

    The level is a fading mean of what its earlier blocks gave for surviving `KNOWN_POSITIONS`; how much of it lasts is
    learnt from block to block. One thread.
    """

    def __init__(self, slots: int, positions: int) -> None:
        self._level = np.full(slots, np.nan)
        """By slot; nan where nothing is known."""
        self._known = min(KNOWN_POSITIONS, positions) - 1
        self._weight = 0.0
        self._mean = np.zeros(positions)
        self._middle = 0.0
        """Mean level."""
        self._both = np.zeros(positions)
        self._spread = 0.0
        """Covariance of levels with the survivals that followed, and variance of levels."""
        self._pairs = 0.0

    @property
    def known(self) -> bool:
        """Whether any block was seen."""
        return self._weight > 0.0

    def forget(self, slot: int) -> None:
        """Another request comes to this slot."""
        self._level[slot] = np.nan

    def aged(self) -> None:
        """A step without a block has passed."""
        self._weight *= 0.5 ** (1.0 / _PAUSE)
        self._pairs *= 0.5 ** (1.0 / _PAUSE)

    def saw(self, slots: Ints, survivals: Floats) -> None:
        """survivals [R, S]: of whole blocks, of the requests at `slots` [R], in the order they were drawn."""
        requests = len(slots)
        if not requests:
            return
        fade = 0.5 ** (1.0 / _HALF_LIFE)
        self._weight = fade * self._weight + requests
        share = requests / self._weight
        self._mean += share * (survivals.mean(axis=0) - self._mean)
        level = self._level[slots]
        there = ~np.isnan(level)
        before = level[there]
        if len(before):
            self._pairs = fade * self._pairs + len(before)
            share = len(before) / self._pairs
            self._middle += share * (before.mean() - self._middle)
            off = before - self._middle
            self._both += share * (off @ (survivals[there] - self._mean) / len(before) - self._both)
            self._spread += share * (off @ off / len(before) - self._spread)
        now = survivals[:, self._known]
        self._level[slots] = np.where(there, _KEPT * level + (1.0 - _KEPT) * now, now)

    def of(self, slots: Ints) -> Floats:
        """[R, S], never rising along positions: survivals of the next block of each of these requests."""
        level = self._level[slots]
        slope = self._both / (self._spread * (1.0 + _PRIOR / max(self._pairs, 1e-9)) + 1e-9)
        off = np.where(np.isnan(level), 0.0, level - self._middle)
        found: Floats = np.minimum.accumulate(np.clip(self._mean + off[:, None] * slope, 0.0, 1.0), axis=1)
        return found
