"""Recent observations of all sizes, that coefficients are fitted to."""

from collections import deque
from collections.abc import Hashable
from itertools import chain
from typing import Any

_RECENT = 256
_KEPT = 16  # older ones of each size
_HALF_LIFE = 512  # observations until one weighs half
_FORGOTTEN = 8 * _HALF_LIFE
_ERRORS = 64


class Recent:
    """The last 256 observations, and of each size 16 older ones, so that many small ones do not push out the few large
    ones that tell the quadratic term; older ones weigh less. One thread."""

    def __init__(self) -> None:
        self.observations = 0
        """Since the start."""
        self._recent: deque[tuple[int, Hashable, Any, float]] = deque()
        self._kept: dict[Hashable, deque[tuple[int, Hashable, Any, float]]] = {}
        """Older ones, by size."""
        self._errors: deque[float] = deque(maxlen=_ERRORS)

    def __len__(self) -> int:
        """How many are held."""
        return len(self._recent) + sum(map(len, self._kept.values()))

    @property
    def error(self) -> float | None:
        """Median of |predicted - observed| / observed of the last 64, predicted before they were used; else None."""
        return sorted(self._errors)[len(self._errors) // 2] if self._errors else None

    def add(self, size: Hashable, load: Any, predicted: float, seconds: float) -> None:
        """`load` took `seconds`, more than none, and was thought to take `predicted`; `size`: what counts as alike."""
        self.observations += 1
        self._errors.append(abs(predicted - seconds) / seconds)
        if len(self._recent) == _RECENT:
            old = self._recent.popleft()
            if old[1] not in self._kept:
                self._kept[old[1]] = deque(maxlen=_KEPT)
            self._kept[old[1]].append(old)
        self._recent.append((self.observations, size, load, seconds))

    def observed(self) -> tuple[list[Any], list[float], list[float]]:
        """Loads, seconds and weights; at least one of each, after a first `add`."""
        for size, kept in list(self._kept.items()):
            while kept and self.observations - kept[0][0] > _FORGOTTEN:
                kept.popleft()
            if not kept:
                del self._kept[size]
        ages, _, loads, seconds = map(list, zip(*self._recent, *chain(*self._kept.values()), strict=True))
        return loads, seconds, [0.5 ** ((self.observations - age) / _HALF_LIFE) for age in ages]
