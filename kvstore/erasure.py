"""A back end over k + m others, of which any m may be lost: slots in shards, one on each root.

Reads take the first k good shards out of k + 1 asked for, and ask further roots when one fails or is late. Writes go to
all roots and succeed when k did. Which root holds which shard turns with the name of the slab, so that parity, which is
written but rarely read, spreads over all of them.
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from threading import Lock
from typing import TypeVar
from zlib import crc32

from deepinfer_kvstore.aio import Rings
from deepinfer_kvstore.arena import Arenas
from deepinfer_kvstore.backend import Backend
from deepinfer_kvstore.code import Code
from deepinfer_kvstore.erasure_counters import Counters
from deepinfer_kvstore.erasure_slab import ErasureSlab
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.root_lane import Lane
from deepinfer_kvstore.shards import Shards, Write
from deepinfer_kvstore.votes import Votes

GRACE_SECONDS = 0.2
"""How long the last roots are waited for once enough have answered to creating, opening, listing and removing."""
KEEP_BYTES = 128 << 20
"""Private memory that is kept for the next transfers."""
_LATE_TIMES, _LATE_SECONDS = 3.0, 0.001
_QUIET = (FileNotFoundError, FileExistsError)  # answers, not failures of a root

T = TypeVar("T")


class ErasureBackend:
    """Slabs of one namespace over the roots of a stripe set. Thread-safe."""

    def __init__(
        self,
        roots: Sequence[tuple[str, Backend | None]],
        code: Code,
        geometry: Geometry,
        stripe_set: int,
        *,
        margin: int = 0,
        timeout_seconds: float = 30.0,
    ) -> None:
        """
        Args:
            roots: Name and back end of each root in the order of the set, None where it is lost.
            geometry: Of the slabs; those of the roots have as many slots, of `Shards.stored_bytes`.
            stripe_set: u64, differs between sets of roots.
            margin: A write succeeds when k + `margin` roots have it. Above 0, a store that has lost m roots takes
                no blocks.
            timeout_seconds: Of each call.
        """
        self.code = code
        self.geometry = geometry
        self.shards = Shards(code, geometry.slot_bytes, stripe_set)
        self.lanes = [Lane(name, backend) for name, backend in roots]
        self.arenas = Arenas(code.shards, self.shards.stored_bytes, KEEP_BYTES)
        self.needed = code.data + margin
        self.timeout_seconds = timeout_seconds
        self.rings = Rings(code.shards)
        self.counters = Counters()
        self._process = int.from_bytes(os.urandom(8), "little")
        self._writes = 0
        self._lock = Lock()

    def create(self, name: str, slot_bytes: int, slots: int) -> ErasureSlab:
        """See `backend.Backend`. Roots that cannot are left out, as long as enough can."""
        slab = ErasureSlab(name, self, Geometry(slot_bytes, slots))
        votes = self.ask(slab.lanes, lambda index, backend: self._create(slab, index, backend), write=True)
        try:
            if sum(isinstance(error, FileExistsError) for error in votes.errors().values()) >= self.code.data:
                raise FileExistsError(errno.EEXIST, "slab exists", name)
            try:
                votes.demand(self.needed, "create", name)
            except OSError:
                self.ask(slab.lanes, lambda index, backend: backend.remove(name), write=True, of=votes.values())
                raise
        except OSError:
            slab.close()
            raise
        return slab

    def open(self, name: str, *, write: bool) -> ErasureSlab:
        """See `backend.Backend`. For writing, a root that lacks its part of the slab gets it."""
        slab = ErasureSlab(name, self, self.geometry)

        def attach(index: int, backend: Backend) -> None:
            slab.attach(index, backend.open(name, write=write))

        votes = self.ask(slab.lanes, attach, write=write)
        lacking = [index for index, error in votes.errors().items() if isinstance(error, FileNotFoundError)]
        try:
            if len(lacking) > self.code.parity:  # only then is it gone for good, and not while roots are away
                raise FileNotFoundError(errno.ENOENT, f"{len(lacking)} roots do not have it", name)
            votes.demand(self.code.data, "open", name)
        except OSError:
            slab.close()
            raise
        if write and lacking:
            self.ask(slab.lanes, lambda index, backend: self._create(slab, index, backend), write=True, of=lacking)
        return slab

    def names(self) -> list[str]:
        """See `backend.Backend`. Those too that too few roots have to be read, so that they can be removed."""
        votes = self.ask(self.lanes, lambda index, backend: backend.names(), write=False)
        votes.demand(1, "list", "slabs")
        return sorted({name for names in votes.values().values() for name in names})

    def remove(self, name: str) -> None:
        """See `backend.Backend`."""
        votes = self.ask(self.lanes, lambda index, backend: backend.remove(name), write=True)
        votes.demand(1, "remove", name)

    def free_bytes(self) -> int:
        """See `backend.Backend`. The fullest root counts."""
        votes = self.ask(self.lanes, lambda index, backend: backend.free_bytes(), write=False)
        votes.demand(1, "statvfs", "roots")
        return int(min(votes.values().values()) // self.shards.stored_bytes * self.geometry.slot_bytes)

    def close(self) -> None:
        """See `backend.Backend`. Slabs must be closed before. Does not wait for a root that hangs."""
        for lane in self.lanes:
            if lane.backend:
                lane.do(lane.backend.close, write=True)
            lane.close()
        self.rings.close()

    def degraded(self) -> list[str]:
        """Names of the roots that are lost or fail."""
        return [lane.name for lane in self.lanes if lane.degraded]

    def lanes_of(self, name: str) -> list[Lane]:
        """The root of each shard of the slab `name`, by number of shard."""
        first = crc32(name.encode()) % len(self.lanes)
        return self.lanes[first:] + self.lanes[:first]

    def late_seconds(self) -> float:
        """From when on a read counts as late."""
        return _LATE_TIMES * median(lane.read_seconds for lane in self.lanes if lane.backend) + _LATE_SECONDS

    def next_write(self) -> Write:
        """An identity that no other write of any process has."""
        with self._lock:
            self._writes += 1
            return self._process, self._writes

    def ask(
        self,
        lanes: Sequence[Lane],
        call: Callable[[int, Backend], T],
        *,
        write: bool,
        of: Iterable[int] | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> Votes[T]:
        """Have `call(number, back end)` done on the threads of `lanes`, or of those whose numbers are in `of`.

        Returns when all have answered, or enough for reading or writing have and the grace has passed. Late calls are
        still made; what they say is lost.
        """
        asked = range(len(lanes)) if of is None else list(of)
        votes: Votes[T] = Votes(len(asked))
        for index in asked:
            _ask(lanes[index], index, call, votes, write)
        needed = min(self.needed if write else self.code.data, len(asked))
        votes.wait(needed, self.timeout_seconds, grace_seconds)
        return votes

    def _create(self, slab: ErasureSlab, index: int, backend: Backend) -> None:
        try:
            slab.attach(index, backend.create(slab.name, self.shards.stored_bytes, slab.slots))
        except FileNotFoundError as error:
            raise OSError(errno.ENXIO, "the root's directory is gone", slab.name) from error


def _ask(lane: Lane, index: int, call: Callable[[int, Backend], T], votes: Votes[T], write: bool) -> None:
    backend = lane.backend
    if backend is None or not lane.usable(write=write):
        votes.lost(index, OSError(errno.ENODEV, "the root is lost or fails", lane.name))
        return

    def answer() -> None:
        try:
            value = call(index, backend)
        except OSError as error:
            if not isinstance(error, _QUIET):
                lane.failed(error, write=write)
            votes.lost(index, error)
        else:
            lane.worked(write=write)
            votes.won(index, value)

    lane.do(answer, write=write)
