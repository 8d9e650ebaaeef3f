"""Where a chunk of a prompt may end. Pure: knows neither vLLM nor what a chunk costs."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_CHECKPOINTS = 4096
"""Of one request."""


@dataclass(frozen=True)
class Cuts:
    """Of one prompt: where chunks have to end, and what they must not cut. Positions in tokens from its start."""

    checkpoints: tuple[int, ...] = ()
    """Rising, none of them inside an image."""
    starts: tuple[int, ...] = ()
    """Of images, rising."""
    ends: tuple[int, ...] = ()
    """Of these images: the position after their last token."""

    @classmethod
    def of(cls, checkpoints: Iterable[int], images: Iterable[tuple[int, int]]) -> "Cuts":
        """checkpoints: in any order; those inside an image are dropped. images: (first position, tokens)."""
        joined: list[list[int]] = []
        for first, end in sorted((first, first + tokens) for first, tokens in images):
            if joined and first < joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([first, end])
        cuts = cls((), tuple(first for first, _ in joined), tuple(end for _, end in joined))
        return cls(tuple(c for c in sorted({*checkpoints}) if cuts.outside(c) == c), cuts.starts, cuts.ends)

    def outside(self, position: int) -> int:
        """`position`, or the start of the image that it is inside of."""
        at = bisect_left(self.starts, position) - 1
        return self.starts[at] if at >= 0 and position < self.ends[at] else position

    def beyond(self, position: int) -> int:
        """`position`, or the end of the image that it is inside of."""
        at = bisect_left(self.starts, position) - 1
        return self.ends[at] if at >= 0 and position < self.ends[at] else position

    def checkpoint_after(self, position: int) -> int | None:
        """The first one after it."""
        at = bisect_right(self.checkpoints, position)
        return self.checkpoints[at] if at < len(self.checkpoints) else None

    def chunk_end(self, start: int, wanted: int, limit: int, grid: int, *, final: bool, must: bool) -> int:
        """Where the chunk from `start` ends: `start` if there is to be none.

        wanted: as far as it may cost; limit: as far as it can go at all, and with `final` the prompt's end; must: there
        has to be a chunk, be it dearer than wanted. The end is at most `limit` and the next checkpoint, and not inside
        an image; it is a multiple of the grid unless it is the prompt's end, a checkpoint or an edge of an image. Only
        where `limit` leaves no such end a chunk that must be ends there.
        """
        stop = self.checkpoint_after(start)
        top = wanted if stop is None else min(wanted, stop)
        if top > start and (top == stop or (final and top == limit)):
            return top
        end = top - top % grid
        while (edge := self.outside(end)) != end:
            end = edge - edge % grid
        if end > start:
            return end
        if not must:
            return start
        if (end := self._last_edge(top)) > start:
            return end
        end = self.beyond(start + grid - start % grid)
        if stop is not None:
            end = min(end, stop)
        return min(end, limit)

    def _last_edge(self, position: int) -> int:
        """The last start or end of an image at or before it; -1 without one."""
        at = bisect_right(self.starts, position) - 1
        if at < 0:
            return -1
        return self.ends[at] if self.ends[at] <= position else self.starts[at]


PLAIN = Cuts()
"""Of a prompt without images or checkpoints."""


def requested_checkpoints(params: Mapping[str, Any] | None) -> tuple[int, ...]:
    """`chunk_checkpoints` of a request's kv_transfer_params: positive positions. What is none is left out."""
    asked = params.get("chunk_checkpoints") if isinstance(params, Mapping) else None
    if not isinstance(asked, list | tuple):
        return ()
    return tuple(each for each in asked[:MOST_CHECKPOINTS] if type(each) is int and each > 0)
