"""One read of a run of slots: which roots to ask, how long to wait for whom, which shards to take."""

import errno
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_kvstore.aio import Read, Ring
from deepinfer_kvstore.shards import Rows

if TYPE_CHECKING:
    from deepinfer_kvstore.erasure import ErasureBackend
    from deepinfer_kvstore.erasure_slab import ErasureSlab

_COMPUTED_BYTES_PER_SECOND = 2e9
"""Bytes of slots, each lacking one data shard, that zfec makes whole in a second, about."""


Chosen = list[list[int]]
"""For each slot of a run the numbers of k shards of one write; fewer where there are not so many."""


class ShardRead:
    """A read, used once, by one thread. The roots' threads write into its arena, never into the caller's buffers."""

    def __init__(
        self, backend: "ErasureBackend", slab: "ErasureSlab", first_slot: int, slots: int, *, verify: bool
    ) -> None:
        """With `verify`, the hashes of shards are looked at, and not only which write they are of."""
        self._verify = verify
        self._backend = backend
        self._slab = slab
        self._first = first_slot
        self._slots = slots
        self._arena = backend.arenas.take(self._slots)
        self._answers: SimpleQueue[tuple[int, OSError | None]] = SimpleQueue()
        self._candidates: deque[int] = deque()  # shards to ask for next, the best first
        self._prompt: set[int] = set()  # shards on roots that are neither slow nor failing
        self._pending: set[int] = set()
        self._ring: Ring | None = None
        self._in_ring = 0  # reads of ours under way there
        self._came: list[int] = []
        self._checked = 0  # as many of those that came
        self._whole: Any = np.zeros((backend.code.shards, self._slots), bool)
        self._writes: Any = np.zeros((backend.code.shards, self._slots, 2), np.uint64)
        self._chosen: Chosen = [[]] * self._slots
        self._error: OSError | None = None
        self._failed = 0
        self._over = False

    def run(self, use: Callable[[Rows, Chosen], None]) -> None:
        """Get the shards, and hand them to `use` in memory that is private again afterwards.

        Raises:
            OSError: shards are lacking that roots which fail might have, or did not come in time (ETIMEDOUT).
        """
        try:
            self._gather()
            self._backend.counters.add(
                reads=1, unreadable_slots=sum(len(chosen) < self._backend.code.data for chosen in self._chosen)
            )
            use(self._arena.rows, self._chosen)
        finally:
            self._over = True
            if self._ring:
                self._backend.rings.give_back(self._ring)
            self._arena.let_go()

    def _gather(self) -> None:
        """Get shards until each slot has k of one write, or there are no more."""
        needed = self._backend.code.data
        late_seconds = self._backend.late_seconds()
        self._rank(late_seconds)
        while self._candidates and len(self._came) < needed and self._take_cached(self._candidates[0]):
            self._came.append(self._candidates.popleft())
        lacking = self._choose()
        if lacking:
            self._ask(needed + 1 - len(self._came))
        deadline = monotonic() + self._backend.timeout_seconds
        more_at = monotonic() + late_seconds
        while lacking:
            self._ask_extra(lacking - len(self._pending & self._prompt))
            if not self._pending:
                break
            now = monotonic()
            if now >= deadline:
                raise OSError(errno.ETIMEDOUT, f"{len(self._came)} of {needed} shards came in time", self._slab.name)
            if now >= more_at:
                self._ask_extra(1)
                more_at = now + late_seconds if self._candidates else deadline
            if self._receive(lacking, min(more_at, deadline)):
                lacking = self._choose()
        self._demand(needed)
        self._await_data()

    def _demand(self, needed: int) -> None:
        """A slot that roots which fail just now might complete is an error; without them it is as good as punched."""
        lacking = [needed - len(chosen) for chosen in self._chosen]
        if any(short > 0 and (short <= self._failed or len(self._came) < needed) for short in lacking):
            number = self._error.errno if self._error else errno.EIO
            raise OSError(number, f"{len(self._came)} roots could be read, {needed} must be", self._slab.name)

    def _await_data(self) -> None:
        """Wait for data shards that are on their way for as long as computing them would take."""
        data = self._backend.code.data
        computed = sum(sum(index >= data for index in chosen) for chosen in self._chosen)
        until = monotonic() + computed * self._slab.slot_bytes / _COMPUTED_BYTES_PER_SECOND
        while any(index < data for index in self._pending & self._prompt) and monotonic() < until:
            if self._receive(1, until):
                self._choose()

    def _rank(self, late_seconds: float) -> None:
        """Data before parity, so that nothing need be computed; slow roots after that, failing ones last."""
        failing: list[int] = []
        slow: list[int] = []
        for index, (lane, handle) in enumerate(zip(self._slab.lanes, self._slab.handles, strict=True)):
            if handle is None:
                continue
            if not lane.usable(write=False):
                failing.append(index)
            elif lane.is_slow(late_seconds):
                slow.append(index)
            else:
                self._prompt.add(index)
        rested = [index for index in slow if self._slab.lanes[index].has_rested()]
        self._candidates.extend([*sorted(self._prompt), *slow, *failing])
        for index in rested:  # to learn whether it is still slow
            self._candidates.remove(index)
            self._read_on_lane(index)

    def _take_cached(self, index: int) -> bool:
        read = self._slab.cached[index]
        return read is not None and index in self._prompt and read(self._first, self._slots, [self._arena.row(index)])

    def _ask(self, roots: int) -> None:
        asked = [self._candidates.popleft() for _ in range(min(roots, len(self._candidates)))]
        direct = [index for index in asked if index in self._prompt and self._slab.direct[index] is not None]
        if direct:
            self._ring = self._ring or self._backend.rings.take()
        started = self._read_in_ring(self._ring, direct) if direct and self._ring else ()
        for index in asked:
            if index not in started:
                self._read_on_lane(index)

    def _ask_extra(self, roots: int) -> None:
        roots = min(roots, len(self._candidates))
        if roots > 0:
            self._backend.counters.add(extra_roots=roots)
            self._ask(roots)

    def _read_in_ring(self, ring: Ring, indices: list[int]) -> Sequence[int]:
        """Ask for shards; for which of them. The reads keep the arena until they are over."""
        arena, step = self._arena, self._backend.shards.stored_bytes
        reads: list[Read] = []
        for index in indices[: ring.room]:
            fd = self._slab.direct[index]
            if fd is None:  # closed meanwhile
                break
            end = partial(self._end_in_ring, index, self._slab.lanes[index].begin_read())
            reads.append(Read(fd, arena.row_address(index), self._slots * step, self._first * step, end))
        arena.hold(len(reads))
        self._in_ring += len(reads)
        self._pending.update(indices[: len(reads)])
        started = ring.start(reads)
        for read in reads[started:]:
            read.end(False)
        return indices[: len(reads)]

    def _end_in_ring(self, index: int, token: int, whole: bool) -> None:
        self._slab.lanes[index].end_read(token, in_time=not self._over)
        self._arena.let_go()
        if self._over:
            return
        self._in_ring -= 1
        if whole:
            self._answers.put((index, None))
        else:
            self._read_on_lane(index)  # it knows better what is wrong, and whom to tell

    def _read_on_lane(self, index: int) -> None:
        """Ask for a shard. The root's thread keeps the arena until it is through with it."""
        lane, handle, arena = self._slab.lanes[index], self._slab.handles[index], self._arena
        if handle is None:  # closed meanwhile
            self._pending.discard(index)
            return
        self._pending.add(index)
        token = lane.begin_read()
        arena.hold()

        def read() -> None:
            error = None
            wanted = not self._over
            if wanted:
                try:
                    handle.readv(self._first, [arena.row(index)])
                    lane.worked(write=False)
                except OSError as failure:
                    lane.failed(failure, write=False)
                    error = failure
            lane.end_read(token, in_time=wanted)
            arena.let_go()
            self._answers.put((index, error))

        lane.do(read, write=False)

    def _receive(self, least: int, until: float) -> bool:
        """Wait for answers, `least` of them if they take no longer than `until`; whether they brought shards."""
        seconds = max(until - monotonic(), 0.0)
        try:
            if self._ring and self._in_ring:
                self._ring.wait(least, seconds)  # an answer of a thread is not noticed before its end
                index, error = self._answers.get_nowait()
            else:
                index, error = self._answers.get(timeout=seconds)
        except Empty:
            return False
        before = len(self._came)
        while True:
            self._pending.discard(index)
            if error:
                self._error = error
                self._failed += 1
            else:
                self._came.append(index)
            try:
                index, error = self._answers.get_nowait()
            except Empty:
                return len(self._came) > before

    def _choose(self) -> int:
        """Choose shards for each slot. How many more shards are needed at least, 0 when every slot has its k."""
        needed = self._backend.code.data
        if len(self._came) < needed:
            return needed - len(self._came)
        new = self._came[self._checked :]
        self._checked = len(self._came)
        check = self._backend.shards.check
        self._whole[new], self._writes[new], bad = check(self._arena.rows, self._first, new, hashes=self._verify)
        self._backend.counters.add(bad_shards=bad)
        came = sorted(self._came)
        first = came[:needed]
        if self._whole[first].all() and (self._writes[first] == self._writes[first[0]]).all():
            self._chosen = [first] * self._slots
            return 0
        self._chosen = [self._choose_for(slot, came) for slot in range(self._slots)]
        return max(needed - len(chosen) for chosen in self._chosen)

    def _choose_for(self, slot: int, came: list[int]) -> list[int]:
        """Up to k good shards of the write that most of them are of; of the later one if two have as many."""
        writes: dict[tuple[int, int], list[int]] = {}
        for index in came:
            if self._whole[index, slot]:
                process, count = self._writes[index, slot].tolist()
                writes.setdefault((count, process), []).append(index)
        best = max(writes, key=lambda write: (len(writes[write]), write), default=None)
        return writes[best][: self._backend.code.data] if best else []
