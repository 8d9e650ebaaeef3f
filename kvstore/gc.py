"""Garbage collection: keeps a namespace below its watermarks, and its blocks no longer than their time to live.

Collecting is appending DELETE records, each for one block at its location and generation, to the collector's own
journal. The slot's owner reads them as any reader does, and writes to the slot again once no read of it can be under
way. So a collector that dies half-way, or two that collect at once, leave nothing to repair.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.eviction import Eviction, Forest
from deepinfer_kvstore.fill import Fill
from deepinfer_kvstore.gc_lease import GcLease
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.pace import Pace
from deepinfer_kvstore.record import Record
from deepinfer_kvstore.retention import Retention

SCAN_BLOCKS = 1024
"""Blocks read in one transaction of the index: LMDB keeps no page alive for longer than that."""
DELETE_BLOCKS = 512
"""Blocks deleted at once, between two looks at the lease."""
PASS_BLOCKS = 1 << 19
"""Most blocks that one pass evicts: their choice is sorted in memory."""
HURRY_SHARE = 0.5
"""Part of its time that the collecting thread works at least while a writer drops blocks."""
SCAN_PAUSE_SECONDS = 60.0
"""Least time between two passes that look for expired blocks only,"""
SCAN_PAUSE_SHARE = 50
"""and so many times what the last one took."""


class Need(NamedTuple):
    """A writer that has no free slot, and may not add a slab. It makes room among its own blocks, and as much again
    among the least recently used of all: their writers give slabs back once those are empty, and this one may grow.
    """

    writers: Collection[int]
    """Its identities."""
    blocks: int


@dataclass(frozen=True)
class Collected:
    """What one `step` did."""

    leads: bool = False
    """Whether this process holds the lease."""
    scanned: int = 0
    """Blocks looked at."""
    evicted: Mapping[str, int] = field(default_factory=dict)
    """Blocks by reason: `Eviction.reason`."""
    seconds: float = 0.0


class Collector:
    """Collects one namespace while it holds the lease. Used by one thread."""

    def __init__(
        self,
        index: Index,
        lease: GcLease,
        retention: Retention,
        *,
        append: Callable[[Sequence[Record]], object],
        sync: Callable[[], object],
        fill: Callable[[], Fill],
        need: Callable[[], Need | None] = lambda: None,
        lease_s: float,
        pace: Pace,
        clock: Callable[[], float] = monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`append` writes to this process's journal, `sync` brings `index` up to date, `fill` says what is used.

        `need` says what this process's writer lacks. That is collected whoever holds the lease.
        `clock` and `wall` are in seconds; `wall`, which may jump, judges ages of blocks and nothing else.
        """
        self._index = index
        self._lease = lease
        self._retention = retention
        self._append = append
        self._sync = sync
        self._fill = fill
        self._need = need
        self._lease_s = lease_s
        self._pace = pace
        self._share = pace.share
        self._clock = clock
        self._wall = wall
        self._beat_at = self._scan_at = self._credited_at = clock()
        self._credit = retention.expired_per_hour / 60  # as much as a minute earns
        self._ending = False

    def step(self) -> Collected:
        """Collect if it is this process's turn and there is reason to. To be called about once a second.

        Raises:
            OSError: the shared directory cannot be read or written; the next step begins anew.
        """
        began = self._clock()
        leads = self._leads(now=True)
        need = self._need()
        if not leads and need is None:
            return Collected()
        self._sync()
        fill = self._fill()
        blocks = min(self._retention.surplus_blocks(fill), PASS_BLOCKS) if leads else 0
        if need is not None:
            blocks = max(blocks, need.blocks)
        elif not blocks and began < self._scan_at:
            return Collected(leads=True)
        self._pace.share = max(self._share, HURRY_SHARE) if need else self._share
        may = self._leads if leads else lambda: not self._ending
        forest = self._scan(may, need)
        if forest is None:
            return Collected()
        evictions = forest.evictions(
            blocks, self._expired_blocks(fill.capacity_blocks) if leads else 0, need.blocks if need else 0
        )
        evicted = delete(self._index, self._append, evictions, may, self._pace)
        self._credit = max(0.0, self._credit - (evicted["expired"] + evicted["clock"]) / fill.capacity_blocks)
        self._sync()
        took = self._clock() - began
        self._scan_at = self._clock() + max(SCAN_PAUSE_SECONDS, SCAN_PAUSE_SHARE * took)
        return Collected(leads, len(forest), dict(evicted), took)

    def end(self) -> None:
        """Let a step that another thread is in end soon, and no other do anything."""
        self._ending = True

    def release(self) -> None:
        """Let another process collect at once."""
        self._lease.release()

    def _leads(self, *, now: bool = False) -> bool:
        """Whether this process still holds the lease; it beats when there is time to."""
        if self._ending:
            return False
        if not now and self._clock() - self._beat_at < self._lease_s / 4:
            return True
        self._beat_at = self._clock()
        return self._lease.hold()

    def _scan(self, may: Callable[[], bool], need: Need | None) -> Forest | None:
        """All blocks; None when this process may not go on."""
        forest = Forest(int(self._wall() * 1000), self._pace, need.writers if need else ())
        after: Key | None = None
        while found := self._index.entries(after, SCAN_BLOCKS):
            if not may():
                return None
            for key, entry in self._pace.over(found):
                forest.add(key, entry)
            after = found[-1][0]
        return forest

    def _expired_blocks(self, capacity_blocks: int) -> int:
        """How many may go for their age now: what has been earned since, an hour's worth at most."""
        now = self._clock()
        hourly = self._retention.expired_per_hour
        self._credit = min(hourly, self._credit + (now - self._credited_at) / 3600 * hourly)
        self._credited_at = now
        return min(PASS_BLOCKS, max(0, int(self._credit * capacity_blocks)))


def delete(
    index: Index,
    append: Callable[[Sequence[Record]], object],
    evictions: Sequence[Eviction],
    may: Callable[[], bool],
    pace: Pace,
) -> Counter[str]:
    """Append the deletion of blocks that come before those they follow; how many, by reason.

    A block that was used again since the choice stays, and so do those before it. Ends early when `may` says so.

    Raises:
        OSError: the journal cannot be written.
    """
    done: Counter[str] = Counter()
    staying: set[bytes] = set()
    for start in range(0, len(evictions), DELETE_BLOCKS):
        if not may():
            break
        records: list[Record] = []
        reasons: Counter[str] = Counter()
        for short_key, touched_ms, reason in pace.over(evictions[start : start + DELETE_BLOCKS]):
            found = index.entries(short_key, 1)
            if not found or not found[0][0].startswith(short_key):
                continue
            key, entry = found[0]
            if entry.touched_ms != touched_ms or short_key in staying:
                staying.add(key[:2] + entry.parent)
                continue
            records.append(Record.delete(key, entry.location))
            reasons[reason] += 1
        if records:
            append(records)
            done += reasons
    return done


def purge(
    index: Index,
    *,
    append: Callable[[Sequence[Record]], object],
    sync: Callable[[], object],
    match: Callable[[Key, Entry], bool],
) -> int:
    """Delete the blocks that `match`, pinned or not, with all that continue them; how many.

    Blocks of a tenant, for instance, or not used since a time. What is stored meanwhile may be missed.

    Raises:
        OSError: the journal cannot be written.
    """
    purged, pace = 0, Pace()
    sync()
    while True:
        forest, chosen = Forest(0, pace), bytearray()
        after: Key | None = None
        while found := index.entries(after, SCAN_BLOCKS):
            for key, entry in found:
                forest.add(key, entry)
                chosen.append(match(key, entry))
            after = found[-1][0]
        evictions = forest.with_those_after(chosen, "purge")
        gone = delete(index, append, evictions, lambda: True, pace).total()
        sync()
        if not gone:  # a deleted block's place may be taken by another writer's copy
            return purged
        purged += gone
