"""What steps without drafts take, beside what the start's measurement said of as many tokens."""

from __future__ import annotations

from math import exp, log
from statistics import median

_BATCH = 5  # steps whose median counts as one
_KEPT = 16  # medians that a mean remembers
_SURPRISE = 0.1  # of the logarithm: a median farther off counts half at once


class PlainSteps:
    """Factors by the power of two of requests: means of medians of five steps; where none was seen, the nearest's.

    They are apart from those of steps with drafts, which cost more than their tokens: drafts are scheduled, judged,
    masked and taken back. A table that was told of both believed in neither, as few requests with drafts are as many
    tokens as many without. O(1), one thread.
    """

    def __init__(self) -> None:
        self._logs: dict[int, tuple[float, int]] = {}
        """By the power of two: the mean, and how many medians it is of."""
        self._pending: dict[int, list[float]] = {}
        self.surprises = 0
        """Medians that were more than a tenth off."""

    @property
    def known(self) -> bool:
        """Whether any were seen."""
        return bool(self._logs)

    def observe(self, requests: int, factor: float) -> None:
        """A step took `factor` times what was measured at start."""
        size = requests.bit_length()
        pending = self._pending.setdefault(size, [])
        pending.append(log(factor))
        if len(pending) < _BATCH:
            return
        found, (mean, count) = median(pending), self._logs.get(size, (0.0, 0))
        pending.clear()
        if count and abs(found - mean) > _SURPRISE:
            self.surprises += 1
            count = 1
        count = min(count + 1, _KEPT)
        self._logs[size] = mean + (found - mean) / count, count

    def factor(self, requests: int) -> float:
        """Of steps of so many, once some are known."""
        size = requests.bit_length()
        return exp(self._logs[min(self._logs, key=lambda seen: abs(seen - size))][0])
