"""From slots into the callers' buffers: neighbouring slots in one read, each block checked for itself."""

import errno
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from deepinfer_kvstore.breaker import Breaker
from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.geometry import HEADER_BYTES, PAGE_BYTES
from deepinfer_kvstore.header import Flaw, Seal
from deepinfer_kvstore.io import IoThreads
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.slabs import OpenSlabs, slab_name
from deepinfer_kvstore.stats import Counters, Miss
from deepinfer_kvstore.transfer import Transfer

MAX_SLOTS_PER_CALL = 512
"""Two buffers each, of the 1024 that Linux takes at once."""
LEAST_SPLIT_BYTES = 1 << 20
"""A read is not split among threads into smaller parts."""


class Wanted(NamedTuple):
    """One block on its way in."""

    number: int
    """Its number in the transfer."""
    key: Key
    entry: Entry
    buffer: memoryview
    """`entry.length` bytes, writable."""


class Loads:
    """Reads blocks. Thread-safe."""

    def __init__(
        self,
        threads: IoThreads,
        slabs: OpenSlabs,
        seal: Seal,
        counters: Counters,
        breaker: Breaker,
        on_bad: Callable[[Key, Entry, Flaw | None], None],
        *,
        slot_bytes: int,
        run_bytes: int,
        io_threads: int,
    ) -> None:
        """`on_bad(key, entry, flaw)` is told of blocks that are not what the index says; None: unreadable."""
        self.slabs = slabs
        self.seal = seal
        self.counters = counters
        self.breaker = breaker
        self.on_bad = on_bad
        self.slot_bytes = slot_bytes
        self._threads = threads
        self._run_bytes = run_bytes
        self._io_threads = io_threads

    def start(self, wanted: Sequence[Wanted], transfer: Transfer) -> None:
        """Read `wanted` into their buffers, and settle them in `transfer`."""
        share = len(wanted) * self.slot_bytes // self._io_threads
        call_bytes = min(self._run_bytes, max(share, LEAST_SPLIT_BYTES))
        limit = max(1, min(call_bytes // self.slot_bytes, MAX_SLOTS_PER_CALL))
        for run in _runs(wanted, limit):
            self._threads.submit(_LoadRun(self, run, transfer))


def _runs(wanted: Sequence[Wanted], limit: int) -> list[list[Wanted]]:
    """Blocks in neighbouring slots together, at most `limit`."""
    runs: list[list[Wanted]] = []
    due = (-1, -1, -1)
    for block in sorted(wanted, key=lambda block: block.entry.location):
        writer, slab, slot, _ = block.entry.location
        if (writer, slab, slot) != due or len(runs[-1]) == limit:
            runs.append([])
        runs[-1].append(block)
        due = writer, slab, slot + 1
    return runs


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

    def _read(self, wanted: list[Wanted], bounce: memoryview) -> None:
        """Payloads go into the buffers up to their last whole page; what is left, and the header, into `bounce`.

        So a page-aligned buffer can be read past the page cache, though payloads are not whole pages.
        """
        loads = self._loads
        began = monotonic()
        location = wanted[0].entry.location
        buffers: list[memoryview] = []
        rests: list[memoryview] = []
        at = 0
        for block in wanted:
            whole = len(block.buffer) // PAGE_BYTES * PAGE_BYTES
            rest = bounce[at : at + loads.slot_bytes - whole]
            at += len(rest)
            rests.append(rest)
            buffers += (block.buffer[:whole], rest) if whole else (rest,)
        try:
            with loads.slabs.use(slab_name(location.writer, location.slab)) as slab:
                slab.readv(location.slot, buffers)
        except FileNotFoundError:
            for block in wanted:
                loads.on_bad(block.key, block.entry, Flaw.GENERATION)
            return self._miss(wanted, Miss.ABSENT)
        except OSError as error:
            if len(wanted) > 1 and error.errno == errno.EIO:  # perhaps of one slot only
                for block in wanted:
                    self._read([block], bounce)
                return
            loads.breaker.failed()
            for block in wanted:
                loads.on_bad(block.key, block.entry, None)
            return self._miss(wanted, Miss.TIMEOUT if error.errno == errno.ETIMEDOUT else Miss.ERROR)
        loads.breaker.succeeded()
        good: list[Wanted] = []
        for block, rest in zip(wanted, rests, strict=True):
            buffer = block.buffer
            whole = len(buffer) // PAGE_BYTES * PAGE_BYTES
            buffer[whole:] = rest[: len(buffer) - whole]
            flaw = loads.seal.flaw(rest[-HEADER_BYTES:], buffer, block.key, block.entry.location.generation)
            if flaw is None:
                good.append(block)
            else:
                loads.on_bad(block.key, block.entry, flaw)
                self._miss([block], flaw)
        moved = sum(len(block.buffer) for block in good)
        loads.counters.loaded(len(good), moved, monotonic() - began)
        for block in good:
            self._transfer.settle(block.number, True, len(block.buffer))

    def _miss(self, wanted: Sequence[Wanted], reason: str) -> None:
        self._loads.counters.missed(reason, len(wanted))
        for block in wanted:
            self._transfer.settle(block.number, False)
