"""A slab of shards on each root, seen as one slab of slots."""

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepinfer_kvstore.backend import Backend, Buffers, Slab
from deepinfer_kvstore.erasure_cached import CachedRead, read_cached
from deepinfer_kvstore.erasure_read import Chosen, ShardRead
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.root_lane import Lane
from deepinfer_kvstore.run_reader import ShardFiles
from deepinfer_kvstore.shards import Rows
from deepinfer_kvstore.votes import Votes

if TYPE_CHECKING:
    from deepinfer_kvstore.erasure import ErasureBackend


class ErasureSlab:
    """See `backend.Slab`. Thread-safe."""

    def __init__(self, name: str, backend: "ErasureBackend", geometry: Geometry) -> None:
        self.name = name
        self.slot_bytes = geometry.slot_bytes
        self.slots = geometry.slab_slots
        self.lanes = backend.lanes_of(name)
        """By number of shard."""
        self.handles: list[Slab | None] = [None] * len(self.lanes)
        """By number of shard; None where the root has no part of the slab, or is not heard of yet."""
        self.cached: list[CachedRead | None] = [None] * len(self.lanes)
        """By number of shard, the way to read without waiting what lies in the page cache, where there is one."""
        self.direct: list[int | None] = [None] * len(self.lanes)
        """By number of shard, the file to read from without a thread; None: a thread has to."""
        self._backend = backend
        self._closed = False

    @property
    def cached_files(self) -> ShardFiles | None:
        """The files of the data shards, where page caches are between them and whoever reads."""
        shards = self._backend.shards
        handles: list[Any] = self.handles[: self._backend.code.data]
        if any(handle is None or read is None for handle, read in zip(handles, self.cached, strict=False)):
            return None
        return ShardFiles([handle.fd for handle in handles], shards.shard_bytes, shards.stored_bytes, shards.set_id)

    def readv(self, first_slot: int, buffers: Buffers) -> None:
        """See `backend.Slab`. A slot of which fewer than k good shards of one write are left reads as zeros."""
        self._readv(first_slot, buffers, verify=True)

    def readv_unverified(self, first_slot: int, buffers: Buffers) -> None:
        """As `readv`, but a damaged shard may go unnoticed: for a caller that checks every slot, and calls `readv` for
        those that are not what they should be. Shards of two writes never meet in a slot here either."""
        self._readv(first_slot, buffers, verify=False)

    def _readv(self, first_slot: int, buffers: Buffers, *, verify: bool) -> None:
        shards, code = self._backend.shards, self._backend.code
        slots = list(shards.by_slot(buffers))
        reads = [read for read in self.cached[: code.data] if read is not None]
        if len(reads) == code.data and read_cached(shards, reads, first_slot, slots, verify=verify):
            return

        def fill(rows: Rows, chosen: Chosen) -> None:
            computed = 0
            for slot, pieces in enumerate(slots):
                if len(chosen[slot]) == code.data:
                    computed += shards.join(rows, slot, chosen[slot], pieces)
                else:
                    for _, piece in pieces:
                        piece[:] = bytes(piece.nbytes)
            self._backend.counters.add(computed_shards=computed)

        ShardRead(self._backend, self, first_slot, len(slots), verify=verify).run(fill)

    def shards_for(self, root: int, first_slot: int, slots: int, use: Callable[[memoryview], None]) -> int:
        """Compute what root number `root` of the set holds of some slots, from the other roots.

        `use` is given its shards as they are stored, zeros where there are none; how many of them are no zeros.

        Raises:
            OSError: see `readv`.
        """
        shards, code = self._backend.shards, self._backend.code
        wanted = self.lanes.index(self._backend.lanes[root])
        restored = 0

        def restore(rows: Rows, chosen: Chosen) -> None:
            nonlocal restored
            for slot, indices in enumerate(chosen):
                if len(indices) == code.data:
                    shards.restore(rows, slot, indices, wanted)
                    restored += 1
                else:
                    rows[wanted, slot] = 0
            use(memoryview(rows[wanted].reshape(-1)))

        ShardRead(self._backend, self, first_slot, slots, verify=True).run(restore)
        return restored

    def writev(self, first_slot: int, buffers: Buffers) -> None:
        """See `backend.Slab`. Returns when enough roots have it; the others follow, in the order of the calls."""
        backend = self._backend
        arena = backend.arenas.take(self._slots_in(buffers))
        votes: Votes[None] = Votes(len(self.lanes))
        try:
            backend.shards.cut(arena.rows, first_slot, buffers, backend.next_write())
            for index, (lane, handle) in enumerate(zip(self.lanes, self.handles, strict=True)):
                if handle is None or not lane.usable(write=True):
                    votes.lost(index, OSError(errno.ENODEV, "the root is lost or fails", lane.name))
                    continue
                row = arena.row(index)
                arena.hold()
                if not lane.write(_write(lane, handle, index, first_slot, row, votes, arena.let_go), arena.rows.nbytes):
                    arena.let_go()
                    votes.lost(index, OSError(errno.EBUSY, "too much waits to be written", lane.name))
        finally:
            arena.let_go()
        votes.wait(backend.needed, backend.timeout_seconds, 0.0)
        votes.demand(backend.needed, "write", self.name)

    def punch(self, first_slot: int, slots: int) -> None:
        """See `backend.Slab`."""
        self._on_handles("punch", lambda handle: handle.punch(first_slot, slots))

    def sync(self) -> None:
        """See `backend.Slab`."""
        self._on_handles("sync", lambda handle: handle.sync())

    def close(self) -> None:
        """See `backend.Slab`."""
        self._closed = True
        for index in range(len(self.lanes)):
            self._close_handle(index)

    def attach(self, index: int, handle: Slab) -> None:
        """Take the part of the slab that holds shards number `index`, which may come late."""
        self.direct[index] = getattr(handle, "direct_fd", None)
        self.cached[index] = getattr(handle, "readv_cached", None) if self.direct[index] is None else None
        self.handles[index] = handle
        if self._closed:
            self._close_handle(index)

    def _slots_in(self, buffers: Buffers) -> int:
        return sum(buffer.nbytes for buffer in buffers) // self.slot_bytes

    def _close_handle(self, index: int) -> None:
        lane, handle = self.lanes[index], self.handles[index]
        self.handles[index] = self.cached[index] = self.direct[index] = None
        if handle is not None:  # it is closed after whatever both threads still have to do with it
            lane.do(lambda: lane.do(handle.close, write=False), write=True)

    def _on_handles(self, what: str, call: Callable[[Slab], None]) -> None:
        def on_handle(index: int, backend: Backend) -> None:
            handle = self.handles[index]
            if handle is None:
                raise FileNotFoundError(errno.ENOENT, "the root has no part of the slab", self.name)
            call(handle)

        votes = self._backend.ask(self.lanes, on_handle, write=True, grace_seconds=0.0)
        votes.demand(self._backend.needed, what, self.name)


def _write(
    lane: Lane,
    handle: Slab,
    index: int,
    first_slot: int,
    row: memoryview,
    votes: Votes[None],
    end: Callable[[], None],
) -> Callable[[], None]:
    def write() -> None:
        try:
            handle.writev(first_slot, [row])
        except OSError as error:
            lane.failed(error, write=True)
            votes.lost(index, error)
        else:
            lane.worked(write=True)
            votes.won(index, None)
        end()

    return write
