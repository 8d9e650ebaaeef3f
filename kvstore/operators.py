"""What operators ask of a store: its namespaces, what is in them, who writes. Works beside engines, and without any."""

import fcntl
import heapq
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time, time_ns
from typing import NamedTuple

from deepinfer_kvstore.compaction import Compactor
from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal import Record
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.namespaces import Namespace, Namespaces
from deepinfer_kvstore.network_fs import file_system_type, is_network
from deepinfer_kvstore.opening import default_index_dir
from deepinfer_kvstore.retention import DAY, HOUR, MINUTE
from deepinfer_kvstore.writer import Claims, Holder

LEASE_SECONDS = 30.0
"""As engines have it by default: on shared storage a lease untouched for so long is a dead writer's."""
AGES = {"1m": MINUTE, "1h": HOUR, "1d": DAY, "3d": 3 * DAY, "7d": 7 * DAY}
"""Upper ends of the histogram of ages, in seconds."""
SCAN_BLOCKS = 1024
_NO_SLABS = Geometry(0, 0)


@contextmanager
def opened(root: Path, index_dir: Path | None = None, name: str | None = None) -> Iterator[list[Namespace]]:
    """The namespaces below `root`, or the one of that name, with indexes up to date. Closed at the end.

    Raises:
        StoreConfigError: no such directory or namespace, or no place for the index.
    """
    namespaces = Namespaces(root, index_dir or default_index_dir(root))
    try:
        try:
            namespaces.scan()
        except OSError as error:
            raise StoreConfigError(f"root {root} cannot be read ({error}): check owner and mount") from error
        found = [namespace for namespace in namespaces.all() if name in (None, namespace.name)]
        if not found:
            have = ", ".join(sorted(namespace.name for namespace in namespaces.all())) or "none"
            raise StoreConfigError(f"root {root} has no namespace {name or ''}: it has {have}")
        for namespace in found:
            namespace.sync()
        yield sorted(found, key=lambda namespace: namespace.name)
    finally:
        namespaces.close()


class Lease(NamedTuple):
    """One writer."""

    writer: int
    host: str
    pid: int
    alive: bool


def leases(directory: Path) -> list[Lease]:
    """The writers of the namespace in `directory`.

    On a local disk a writer is alive while it holds its lock; on a shared one, while its lease is touched.
    """
    shared = is_network(file_system_type(directory))
    found = []
    for path in sorted((directory / "writers").glob("*.lease")):
        holder = Holder.read(path)
        if holder:
            found.append(Lease(holder.writer, holder.host, holder.pid, _locked(path) or (shared and _fresh(path))))
    return found


@contextmanager
def appending(namespace: Namespace) -> Iterator[Callable[[Sequence[Record]], None]]:
    """A function that appends to the namespace's journals, under an identity claimed for the time.

    Raises:
        OSError: the root cannot be written; from the function too, when not all records are in the journal.
    """
    directory = namespace.directory
    shared = is_network(file_system_type(directory))
    claims = Claims(
        [directory / "writers"], [directory / "journals"], namespace.descriptor.digest(), _NO_SLABS,
        lease_s=LEASE_SECONDS, shared=shared,
    )  # fmt: skip
    writer = claims.claim()

    def append(records: Sequence[Record]) -> None:
        writer.beat()
        if not writer.held() or writer.journal.append(records) < len(records):
            raise OSError(f"journal {writer.journal.name} takes no more records")

    try:
        yield append
        compactor = Compactor(writer.journal, namespace.index, writer.held)
        if compactor.worthwhile():  # identities are used again, and each use leaves a file
            compactor.compact()
    finally:
        writer.release()


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
    now_ms = time_ns() // 1_000_000
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


def remove_files(namespace: Namespace) -> None:
    """Remove a namespace that nobody writes to, and this node's index of it. It is closed afterwards.

    Raises:
        OSError: something is left.
    """
    index_path = namespace.index.path
    namespace.close()
    shutil.rmtree(namespace.directory)
    shutil.rmtree(index_path)


def disk_bytes(directory: Path, pattern: str) -> int:
    """Bytes that files of a directory take on their disk."""
    return sum(path.stat().st_blocks * 512 for path in directory.glob(pattern))


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
