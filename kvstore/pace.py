"""Work that may take its time, beside threads that may not."""

from collections.abc import Iterable, Iterator
from time import perf_counter, sleep
from typing import TypeVar

T = TypeVar("T")

_PIECE = 256


class Pace:
    """Spreads loops over time: after each few hundred items the thread sleeps, so that it works `share` of the time.

    The interpreter's lock is free while it sleeps. Without, a loop of seconds would hold it for 5 ms at a time, and
    each step of an engine in the same process would wait for that.
    """

    def __init__(self, share: float = 1.0) -> None:
        """`share`: above 0, up to 1, which is no pause at all. May be changed at any time."""
        self.share = share

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items, with pauses."""
        return self._pausing(items) if self.share < 1 else iter(items)

    def _pausing(self, items: Iterable[T]) -> Iterator[T]:
        began = perf_counter()
        for number, item in enumerate(items, 1):
            yield item
            if not number % _PIECE:
                sleep((perf_counter() - began) * (1 / self.share - 1))
                began = perf_counter()
