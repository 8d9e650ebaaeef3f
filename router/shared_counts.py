"""Workers of one host know each other's counts: a file in shared memory each, which only its worker writes."""

import asyncio
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from time import perf_counter, time_ns
from uuid import uuid4
from zlib import crc32

from deepinfer_router.fleet import Fleet
from deepinfer_router.peer_counts import HEADER, MAGIC, MOST_TARGETS, RECORD, SIZE, PeerCounts, Sums
from deepinfer_router.seconds import A_SECOND
from deepinfer_router.target import Engine, Load, Target

logger = logging.getLogger(__name__)

_SUFFIX = ".counts"
_LOOK_AROUND_S = 0.1
_SHARE_OF_TIME = 0.05
"""Folding takes at most this share: with very many targets it comes more rarely."""


class SharedCounts:
    """Publishes this worker's counts and folds the others' into `Target.peers`. The event loop's thread only.

    A worker holds a lock on its file for as long as it lives, so the kernel tells of its death, kill -9 too; whoever
    sees it first removes the file, and its counts are gone within a tenth of a second. A checksum tells records that
    were being written; they are read at the next fold. So there is no lock to wait for and no order of stores to
    rely on, and what a worker does not read in one fold is only older by that. Targets are known by the engine's id
    and address and the rank, so that no agreement about their order or their lives is needed. A fold costs what has
    changed since the last; tokens that were promised, and came, are published with the next change, or soon.

    One worker, the oldest, polls engines for all: their metrics cost an engine's front end milliseconds. The others
    take what it says of strangers and capacities.
    """

    def __init__(self, fleet: Fleet, directory: Path, clock: Callable[[], float]) -> None:
        """`directory`: of this router's workers alone, in memory (/dev/shm). OSError: no room or no right there."""
        self._fleet = fleet
        self._directory = directory
        self._clock = clock
        self._path = directory / f"{time_ns():020}-{os.getpid()}-{uuid4().hex}{_SUFFIX}"
        self._file, self._map = _make(self._path)
        self._records = bytearray()
        self._writings = 0
        self._others: dict[str, PeerCounts] = {}
        self._leader: PeerCounts | None = None
        """The oldest worker; None: this one."""
        self._sums = Sums()
        self._targets: dict[int, Target] = {}
        self._places: dict[Target, tuple[int, int]] = {}
        """Key and offset of each target's record."""
        self._version = -1
        self._look_at = 0.0
        fleet.touched = set()

    @property
    def workers(self) -> int:
        """Living ones, this one included, as of the last look."""
        return 1 + len(self._others)

    @property
    def leads(self) -> bool:
        """Whether this worker polls for all."""
        return self._leader is None

    async def run(self, interval_s: float = 0.005) -> None:
        """Folds until it is cancelled, then leaves."""
        try:
            while True:
                began = perf_counter()
                self.fold()
                await asyncio.sleep(max(interval_s, (perf_counter() - began) / _SHARE_OF_TIME))
        except Exception:
            logger.exception("workers do not see each other's requests any more, and balance worse")
        finally:
            self.close()

    def fold(self) -> None:
        """Publishes own counts, and takes the others'."""
        if self._version != self._fleet.version:
            self._learn_targets()
        look = self._clock() >= self._look_at
        if look:
            self._look_at = self._clock() + _LOOK_AROUND_S
            self._look_around()
        self._publish(self._places if look else self._fleet.touched or ())
        for other in self._others.values():
            other.read(self._sums)
        self._see()

    def close(self) -> None:
        """Leaves: others forget its counts, and it theirs."""
        if self._file < 0:
            return
        self._fleet.touched = None
        self._path.unlink(missing_ok=True)
        self._map.close()
        os.close(self._file)
        self._file = -1
        for other in self._others.values():
            other.leave(self._sums)
        self._others.clear()
        self._leader = None
        self._see()

    def _learn_targets(self) -> None:
        self._version = self._fleet.version
        targets = [target for engine in self._fleet.engines.values() for target in engine.targets]
        if len(targets) > MOST_TARGETS:
            logger.warning("%d targets: other workers hear of the first %d only", len(targets), MOST_TARGETS)
        keys = [_key(target.engine, target.rank) for target in targets[:MOST_TARGETS]]
        self._places = {
            target: (key, number * RECORD.size) for number, (key, target) in enumerate(zip(keys, targets, strict=False))
        }
        self._targets = dict(zip(keys, targets, strict=False))
        self._records = bytearray(len(keys) * RECORD.size)
        self._sums.touched.update(keys)
        self._publish(self._places)

    def _publish(self, targets: Iterable[Target]) -> None:
        records = self._records
        for target in targets:
            place = self._places.get(target)
            if place is not None:
                key, offset = place
                own, strangers, capacity = target.own, target.strangers, target.capacity_tokens
                RECORD.pack_into(
                    records,
                    offset,
                    key,
                    own.active,
                    own.kv_tokens,
                    int(own.pending_seconds * A_SECOND),
                    own.held_tokens,
                    strangers.active,
                    strangers.kv_tokens,
                    -1 if capacity is None else capacity,
                    target.shared_tokens,
                )
        touched = self._fleet.touched
        if touched or targets is self._places:
            self._writings += 1
            self._map[HEADER.size : HEADER.size + len(records)] = records
            self._map[: HEADER.size] = HEADER.pack(MAGIC, self._writings, crc32(records), len(records))
        if touched:
            touched.clear()

    def _look_around(self) -> None:
        try:
            there = os.listdir(self._directory)
        except OSError:
            # The supervisor that ends may have removed it.
            there = []
        names = {name for name in there if name.endswith(_SUFFIX) and name != self._path.name}
        for name in names - self._others.keys():
            with suppress(OSError):
                self._others[name] = PeerCounts(self._directory / name)
        for name, other in list(self._others.items()):
            if other.is_dead():
                other.remove()
                other.leave(self._sums)
                del self._others[name]
        oldest = min(self._others, default="")
        leader = self._others[oldest] if oldest and oldest < self._path.name else None
        if leader is not self._leader:
            self._leader = leader
            self._sums.touched.update(self._targets)

    def _see(self) -> None:
        sums = self._sums
        if sums.touched:
            for key in sums.touched:
                target = self._targets.get(key)
                if target is not None:
                    target.see_peers(sums.load(key))
                    if self._leader is not None and key in self._leader.polled:
                        _see_polled(target, *self._leader.polled[key])
            sums.touched.clear()
            self._fleet.loads_changed()


def _see_polled(target: Target, active: int, kv_tokens: int, capacity: int, shared_tokens: int) -> None:
    target.see_strangers(Load(active, kv_tokens, 0.0, kv_tokens))
    target.shared_tokens = shared_tokens
    if capacity >= 0:
        target.capacity_tokens = capacity


def _key(engine: Engine, rank: int) -> int:
    named = f"{engine.id}\0{engine.url}\0{rank}".encode()
    return int.from_bytes(blake2b(named, digest_size=8).digest(), "little")


def _make(path: Path) -> tuple[int, mmap.mmap]:
    """A locked file that appears under its name only when it is whole, and whose pages are there already."""
    unnamed = path.with_suffix(".new")
    file = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Writing to a page for which there is no memory would kill the process.
        os.posix_fallocate(file, 0, SIZE)
        mapped = mmap.mmap(file, SIZE)
        os.rename(unnamed, path)
    except BaseException:
        os.close(file)
        unnamed.unlink(missing_ok=True)
        raise
    return file, mapped
