"""From slots into the callers' buffers: neighbouring slots in one read, each block checked for itself."""

import errno
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from deepinfer_kvstore.breaker import Breaker
from deepinfer_kvstore.entry import Location
from deepinfer_kvstore.geometry import HEADER_BYTES, PAGE_BYTES
from deepinfer_kvstore.header import Flaw, Seal
from deepinfer_kvstore.io import IoThreads
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.slabs import OpenSlabs, slab_name
from deepinfer_kvstore.stats import Counters, Miss
from deepinfer_kvstore.transfer import Transfer

MAX_SLOTS_PER_CALL = 512
"""Two buffers each, of the 1024 that Linux takes at once."""

Wanted = tuple[Location, int, Key, memoryview]
"""Where a block is, its number in the transfer, its key, and the writable buffer of its length."""


class Loads:
    """Reads blocks. Thread-safe."""

    def __init__(
        self,
        threads: IoThreads,
        slabs: OpenSlabs,
        seal: Seal,
        counters: Counters,
        breaker: Breaker,
        on_bad: Callable[[Key, Location, Flaw | None], None],
        *,
        slot_bytes: int,
        run_bytes: int,
    ) -> None:
        """`on_bad(key, location, flaw)` is told of blocks that are not what the index says; None: unreadable."""
        self.slabs = slabs
        self.seal = seal
        self.counters = counters
        self.breaker = breaker
        self.on_bad = on_bad
        self.slot_bytes = slot_bytes
        self._threads = threads
        self._limit = max(1, min(run_bytes // slot_bytes, MAX_SLOTS_PER_CALL))

    def start(self, wanted: Sequence[Wanted], transfer: Transfer) -> None:
        """Read `wanted` into their buffers, and settle them in `transfer`."""
        for run in runs_of(wanted, self._limit):
            self._threads.submit(_LoadRun(self, run, transfer))


def runs_of(wanted: Sequence[Wanted], limit: int) -> Iterator[list[Wanted]]:
    """Blocks in neighbouring slots together, at most `limit`."""
    run: list[Wanted] = []
    due = (-1, -1, -1)
    for block in sorted(wanted):
        writer, slab, slot, _ = block[0]
        if (writer, slab, slot) != due or len(run) == limit:
            if run:
                yield run
            run = []
        run.append(block)
        due = writer, slab, slot + 1
    if run:
        yield run


class _LoadRun:
    """One read call. A `Job`."""

    is_store = False

    def __init__(self, loads: Loads, wanted: list[Wanted], transfer: Transfer) -> None:
        self.deadline = transfer.deadline
        self._loads = loads
        self._wanted = wanted
        self._transfer = transfer

    def run(self, bounce: memoryview) -> None:
        if not self._loads.breaker.admit():
            return self._miss(self._wanted, Miss.BREAKER)
        self._read(self._wanted, bounce)

    def expire(self) -> None:
        self._miss(self._wanted, Miss.TIMEOUT)

    def overran(self) -> None:
        self._loads.breaker.failed()

    def _read(self, wanted: list[Wanted], bounce: memoryview, *, again: bool = False) -> None:
        """Payloads go into the buffers up to their last whole page; what is left, and the header, into `bounce`.

        So a page-aligned buffer can be read past the page cache, though payloads are not whole pages. A block that
        is not what was expected is read again: the open slab may be one that was removed, another having its name.
        """
        loads = self._loads
        began = monotonic()
        slot_bytes = loads.slot_bytes
        buffers: list[memoryview] = []
        ends: list[int] = []
        at = 0
        for _, _, _, buffer in wanted:
            whole = len(buffer) // PAGE_BYTES * PAGE_BYTES
            if whole:
                buffers.append(buffer[:whole])
            end = at + slot_bytes - whole
            buffers.append(bounce[at:end])
            ends.append(end)
            at = end
        first = wanted[0][0]
        name = slab_name(first.writer, first.slab)
        try:
            with loads.slabs.use(name) as slab:
                slab.readv(first.slot, buffers)
        except OSError as error:
            return self._failed(wanted, error, bounce)
        loads.breaker.succeeded()
        good: list[int] = []
        bad: list[tuple[Wanted, Flaw]] = []
        moved = at = 0
        is_whole = loads.seal.is_whole
        for block, end in zip(wanted, ends, strict=True):
            location, number, key, buffer = block
            length = len(buffer)
            tail = length % PAGE_BYTES
            if tail:
                buffer[length - tail :] = bounce[at : at + tail]
            at = end
            header = bounce[end - HEADER_BYTES : end]
            if is_whole(header, buffer, key, location.generation):
                good.append(number)
                moved += length
            else:
                bad.append((block, loads.seal.flaw(header, buffer, key, location.generation) or Flaw.HEADER))
        loads.counters.loaded(len(good), moved, monotonic() - began)
        self._transfer.settle_all(good, True, moved)
        if bad and not again:
            loads.slabs.forget(name)
            for block, _ in bad:
                self._read([block], bounce, again=True)
            return
        for (location, number, key, _), flaw in bad:
            loads.on_bad(key, location, flaw)
            loads.counters.missed(flaw)
            self._transfer.settle(number, False)

    def _failed(self, wanted: list[Wanted], error: OSError, bounce: memoryview) -> None:
        loads = self._loads
        if len(wanted) > 1 and error.errno == errno.EIO:  # perhaps of one slot only
            for block in wanted:
                self._read([block], bounce)
            return
        gone = isinstance(error, FileNotFoundError)
        if not gone:
            loads.breaker.failed()
        for location, _, key, _ in wanted:
            loads.on_bad(key, location, Flaw.GENERATION if gone else None)
        timed_out = error.errno == errno.ETIMEDOUT
        self._miss(wanted, Miss.ABSENT if gone else Miss.TIMEOUT if timed_out else Miss.ERROR)

    def _miss(self, wanted: Sequence[Wanted], reason: Miss) -> None:
        self._loads.counters.missed(reason, len(wanted))
        self._transfer.settle_all([number for _, number, _, _ in wanted], False)
