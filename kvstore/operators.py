"""What operators ask of a namespace: what is in it, and who writes. Beside engines, and without any."""

import fcntl
import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import time
from typing import NamedTuple

from deepinfer_kvstore.bare_namespace import LEASE_SECONDS
from deepinfer_kvstore.entry import Entry, wall_ms
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.retention import DAY, HOUR, MINUTE
from deepinfer_kvstore.writer import Holder

AGES = {"1m": MINUTE, "1h": HOUR, "1d": DAY, "3d": 3 * DAY, "7d": 7 * DAY}
"""Upper ends of the histogram of ages, in seconds."""
SCAN_BLOCKS = 1024


class Lease(NamedTuple):
    """One writer."""

    writer: int
    host: str
    pid: int
    alive: bool


def leases(directories: Sequence[Path], *, shared: bool) -> list[Lease]:
    """The writers whose leases are in `directories`, which are replicas of each other.

    On a local disk a writer is alive while it holds its lock; on a shared one, while its lease is touched too.
    """
    found: dict[int, Lease] = {}
    for directory in directories:
        for path in sorted(directory.glob("*.lease")):
            if holder := Holder.read(path):
                alive = _locked(path) or (shared and _fresh(path))
                before = found.get(holder.writer)
                found[holder.writer] = (
                    before if before and before.alive else Lease(holder.writer, holder.host, holder.pid, alive)
                )
    return [found[writer] for writer in sorted(found)]


def blocks(index: Index, progress: Callable[[int, int], object]) -> Iterator[tuple[Key, Entry]]:
    """All blocks, in the order of their keys. `progress` is told blocks passed, and how many there are about."""
    total, done = index.totals().keys, 0
    after: Key | None = None
    while found := index.entries(after, SCAN_BLOCKS):
        yield from found
        after = found[-1][0]
        done += len(found)
        progress(min(done, total), total)


def ages(index: Index, progress: Callable[[int, int], object]) -> Counter[str]:
    """Blocks by the time since their last use: up to each of `AGES`, older, or pinned (their use is still to come)."""
    now_ms = wall_ms()
    found: Counter[str] = Counter(dict.fromkeys((*AGES, "older", "pinned"), 0))
    for _, entry in blocks(index, progress):
        seconds = (now_ms - entry.touched_ms) / 1000
        if seconds < -MINUTE:
            found["pinned"] += 1
        else:
            found[next((name for name, limit in AGES.items() if seconds <= limit), "older")] += 1
    return found


def listing(
    index: Index,
    *,
    oldest: bool,
    limit: int,
    match: Callable[[Key, Entry], bool],
    progress: Callable[[int, int], object],
) -> list[tuple[Key, Entry]]:
    """Up to `limit` blocks that match, by their last use: latest first, or oldest first."""
    chosen = (found for found in blocks(index, progress) if match(*found))
    pick = heapq.nsmallest if oldest else heapq.nlargest
    return pick(limit, chosen, key=lambda found: (found[1].touched_ms, found[0]))


def chosen(
    index: Index, match: Callable[[Key, Entry], bool], progress: Callable[[int, int], object]
) -> tuple[int, int]:
    """Number and payload bytes of the blocks that match."""
    lengths = [entry.length for key, entry in blocks(index, progress) if match(key, entry)]
    return len(lengths), sum(lengths)


def disk_bytes(directories: Sequence[Path], pattern: str) -> int:
    """Bytes that files take on their disks."""
    return sum(path.stat().st_blocks * 512 for directory in directories for path in directory.glob(pattern))


def _locked(path: Path) -> bool:
    """Whether a process holds the file's lock."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system
        return False
    finally:
        os.close(file)
    return False


def _fresh(path: Path) -> bool:
    try:
        return time() - path.stat().st_mtime < LEASE_SECONDS
    except OSError:
        return False
