"""Which blocks go: expired first, then the least recently used, and none before the blocks that continue it.

A block is used whenever a block after it in its chain is used, so it counts as used when the last of those was, and
expires when the last of those does. The order of eviction is then that of a heap of leaves, as prefix trees in memory
have it, and whatever number of blocks goes, what stays is whole prefixes: a lookup may search them by bisection.

A use in the future is a pin: a reader that needs a block until then (a ticket, say) touches it with that time, and all
blocks before it stay too. One further away than `PIN_LIMIT_MS` is no pin but the trace of a clock that was wrong. When
the block was used nobody can say, so it goes first, and as slowly as blocks expire (`Retention.expired_per_hour`).
"""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from heapq import nsmallest
from itertools import pairwise
from typing import NamedTuple

from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.pace import Pace
from deepinfer_kvstore.retention import ttl_seconds

PIN_LIMIT_MS = 3_600_000
"""The longest pin, and the most by which the clocks of two nodes may differ."""
SHORT_KEY_BYTES = 10
"""Schema and the first 8 bytes of the hash, as entries name the block before theirs."""

# What blocks are sorted by: the time of use, below zero where that cannot be, above `_ALIVE` until it expires.
_ALIVE = 1 << 61
_STAYS = 1 << 62
_UNKNOWN = 1 << 60
_LIFETIMES_MS = [_ALIVE if (seconds := ttl_seconds(number)) is None else seconds * 1000 for number in range(256)]
_MASK = (1 << 32) - 1


class Eviction(NamedTuple):
    """One block to evict, if it is still what it was."""

    short_key: bytes
    """The first `SHORT_KEY_BYTES` of its key."""
    touched_ms: int
    """Its entry's: another one means that the block has been used again."""
    reason: str
    """`expired`, `clock` (used in a future that is no pin), `space` or `purge`."""


class Forest:
    """The blocks of a namespace as trees of prefixes, in arrays: 40 bytes a block, a few seconds for 1 M blocks.

    Blocks are added in the order of their keys, which is the index's own. `evictions` can be asked for once.
    """

    def __init__(self, now_ms: int, pace: Pace, own: Collection[int] = ()) -> None:
        """`now_ms`: what pins and times to live are compared with, Unix time in milliseconds. `own`: some writers."""
        self._now_ms = now_ms
        self._pace = pace
        self._own = own
        self._schemas: list[tuple[bytes, int]] = []  # and where the blocks of each begin
        self._hashes = array("Q")
        self._parents = array("Q")
        self._depths = array("I")
        self._touched_ms = array("Q")
        self._ranks = array("q")
        self._is_own = bytearray()

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, key: Key, entry: Entry) -> None:
        """One more block, of a larger key than those before."""
        if not self._schemas or self._schemas[-1][0] != key[:2]:
            self._schemas.append((key[:2], len(self)))
        self._hashes.append(int.from_bytes(key[2:SHORT_KEY_BYTES], "big"))
        self._parents.append(int.from_bytes(entry.parent, "big"))
        self._depths.append(entry.depth)
        self._touched_ms.append(entry.touched_ms)
        self._ranks.append(self._rank(entry))
        self._is_own.append(entry.location.writer in self._own)

    def _rank(self, entry: Entry) -> int:
        used = entry.touched_ms
        if used > self._now_ms:
            return _STAYS if used - self._now_ms <= PIN_LIMIT_MS else used % _UNKNOWN - _UNKNOWN
        return used + _ALIVE if used + _LIFETIMES_MS[entry.ttl_class] >= self._now_ms else used

    def evictions(self, blocks: int, expired_blocks: int, own_blocks: int = 0) -> list[Eviction]:
        """The first blocks in the order of eviction: `blocks` for space, or as many as have expired if those are more,
        but then at most `expired_blocks`; and the first `own_blocks` of `own`. Blocks after others come before them.
        """
        for start, end in self._spans():
            self._use_ancestors(start, end)
        expired = sum(rank < _ALIVE for rank in self._pace.over(self._ranks))
        first = nsmallest(max(blocks, min(expired, expired_blocks)), self._order())
        if not own_blocks:
            return [self._eviction(place & _MASK) for place in first]
        chosen = bytearray(len(self))
        for place in [
            *first,
            *nsmallest(own_blocks, (place for place in self._order() if self._is_own[place & _MASK])),
        ]:
            chosen[place & _MASK] = 1
        return self.with_those_after(chosen)

    def _order(self) -> Iterator[int]:
        """For each block that may go a number that sorts them: expired, use, depth. The last 32 bits are its place."""
        for block, (rank, depth) in enumerate(self._pace.over(zip(self._ranks, self._depths, strict=True))):
            if rank < _STAYS:
                yield (rank + _UNKNOWN) << 64 | (_MASK - depth) << 32 | block

    def with_those_after(self, chosen: bytearray, reason: str = "") -> list[Eviction]:
        """The blocks whose byte in `chosen`, in the order of adding, is 1, and all after them, which come first."""
        gone = []
        for start, end in self._spans():
            order = self._by_depth(start, end)
            for block in reversed(order):
                if any(chosen[parent] for parent in self._parents_of(block, start, end)):
                    chosen[block] = 1
            gone += [self._eviction(block, reason) for block in order if chosen[block]]
        return gone

    def _use_ancestors(self, start: int, end: int) -> None:
        """Raise each block's rank to the largest of those after it."""
        ranks = self._ranks
        for block in self._pace.over(self._by_depth(start, end)):
            rank = ranks[block]
            for parent in self._parents_of(block, start, end):
                if ranks[parent] < rank:
                    ranks[parent] = rank

    def _parents_of(self, block: int, start: int, end: int) -> Iterable[int]:
        """The block before `block`: none where it is not here, several where hashes agree in 8 bytes."""
        parent, hashes, depths = self._parents[block], self._hashes, self._depths
        first = last = bisect_left(hashes, parent, start, end) if parent else end
        while last < end and hashes[last] == parent:
            last += 1
        return [found for found in range(first, last) if depths[found] < depths[block]]

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Where the blocks of each schema begin and end."""
        starts = [start for _, start in self._schemas]
        return pairwise([*starts, len(self)])

    def _by_depth(self, start: int, end: int) -> "array[int]":
        """The blocks from `start` to `end`, deepest first: a counting sort, for there are few depths."""
        counts: dict[int, int] = {}
        for depth in self._pace.over(self._depths[start:end]):
            counts[depth] = counts.get(depth, 0) + 1
        place, places = 0, {}
        for depth in sorted(counts, reverse=True):
            places[depth] = place
            place += counts[depth]
        ordered = array("I", bytes(4 * (end - start)))
        for block in self._pace.over(range(start, end)):
            depth = self._depths[block]
            ordered[places[depth]] = block
            places[depth] += 1
        return ordered

    def _eviction(self, block: int, reason: str = "") -> Eviction:
        rank = self._ranks[block]
        reason = reason or ("clock" if rank < 0 else "expired" if rank < _ALIVE else "space")
        schema = next(schema for schema, start in reversed(self._schemas) if start <= block)
        return Eviction(schema + self._hashes[block].to_bytes(8, "big"), self._touched_ms[block], reason)
