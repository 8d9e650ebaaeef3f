"""Neighbouring slots read into their blocks' buffers, each block checked for itself: in C, or by the same in Python."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from deepinfer_kvstore.backend import ShortRead, Slab
from deepinfer_kvstore.breaker import Breaker
from deepinfer_kvstore.entry import Location
from deepinfer_kvstore.geometry import HEADER_BYTES, PAGE_BYTES
from deepinfer_kvstore.header import Flaw, Seal
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.run_reader import RunReader
from deepinfer_kvstore.slabs import OpenSlabs
from deepinfer_kvstore.slot_run import SlotRun
from deepinfer_kvstore.stats import Counters, Miss
from deepinfer_kvstore.transfer import Transfer

_WHOLE_PAGES = -PAGE_BYTES


@dataclass
class Reads:
    """What all reads of a store have in common. Thread-safe."""

    slabs: OpenSlabs
    seal: Seal
    counters: Counters
    breaker: Breaker
    on_bad: Callable[[Key, Location, bool], None]
    """Told key and location of blocks that could not be loaded, and whether it is for good."""
    slot_bytes: int
    call_slots: int
    """Most slots in one call of the kernel."""
    reader: RunReader | None
    """None: Python does it."""


class LoadRun:
    """A run on its way to a transfer. A `Job`.

    Payloads go into the buffers up to their last whole page; what is left, and the header, into the thread's `bounce`.
    So a page-aligned buffer can be read past the page cache, though payloads are not whole pages.
    """

    is_store = False

    def __init__(self, reads: Reads, run: SlotRun, transfer: Transfer) -> None:
        self.deadline = transfer.deadline
        self._reads = reads
        self._run = run
        self._transfer = transfer
        self._good: list[int] = []
        self._moved_bytes = 0

    def run(self, bounce: memoryview) -> None:
        reads = self._reads
        if not reads.breaker.admit():
            return self._miss(self._run, Miss.BREAKER)
        began = monotonic()
        if doubtful := self._read(self._run, bounce):
            # The open slab may be one that was removed, another having its name by now; or one part of it was bad,
            # which the other parts can tell.
            reads.slabs.forget(self._run.slab_name)
            for block in doubtful:
                self._read_again(block, bounce)
        reads.counters.loaded(len(self._good), self._moved_bytes, monotonic() - began)
        self._transfer.settle_all(self._good, True, self._moved_bytes)

    def expire(self) -> None:
        self._miss(self._run, Miss.TIMEOUT)

    def overran(self) -> None:
        self._reads.breaker.failed()

    def _read(self, run: SlotRun, bounce: memoryview) -> list[SlotRun]:
        """Read all; the blocks that are not what was expected, each by itself. What cannot be read is missed here."""
        doubtful: list[SlotRun] = []
        rest = run
        try:
            with self._reads.slabs.use(run.slab_name) as slab:
                if (whole := self._compiled(slab, run, bounce)) is not None:
                    return self._sort_out(run, whole)
                for begin in range(0, len(run.keys), self._reads.call_slots):
                    rest = run.part(begin, len(run.keys))
                    some = run.part(begin, begin + self._reads.call_slots)
                    try:
                        read = getattr(slab, "readv_unverified", slab.readv)
                        doubtful += self._sort_out(some, self._call(read, some, bounce))
                    except OSError as error:
                        if error.errno != errno.EIO:
                            raise
                        if len(some.keys) == 1:
                            self._failed(some, error)
                        else:  # perhaps of one slot only
                            doubtful += [one for single in some.blocks() for one in self._read(single, bounce)]
        except OSError as error:
            self._failed(rest, error)
        return doubtful

    def _read_again(self, block: SlotRun, bounce: memoryview) -> None:
        """A run of one block that was not what was expected: what is not now is missed, for what its header says."""
        try:
            with self._reads.slabs.use(block.slab_name) as slab:
                whole = self._call(slab.readv, block, bounce)
        except OSError as error:
            return self._failed(block, error)
        if not self._sort_out(block, whole):
            return
        end = self._reads.slot_bytes - (len(block.buffers[0]) & _WHOLE_PAGES)
        header = bounce[end - HEADER_BYTES : end]
        flaw = self._reads.seal.flaw(header, block.buffers[0], block.keys[0], block.generations[0]) or Flaw.HEADER
        # A MAC may be wrong because this process has the wrong secret.
        self._reads.on_bad(block.keys[0], block.location(0), flaw != Flaw.MAC)
        self._miss(block, flaw)

    def _compiled(self, slab: Slab, run: SlotRun, bounce: memoryview) -> bytes | None:
        """`_call` for all of a run, in C where it can be; None where it cannot, or the kernel refused something."""
        reader = self._reads.reader
        if reader is None:
            return None
        if (fd := getattr(slab, "read_fd", None)) is not None:
            return reader.read(fd, run, bounce)
        if (files := getattr(slab, "cached_files", None)) is not None:
            return reader.read_shards(files, run, bounce)
        return None

    def _call(self, read: Callable[[int, list[memoryview]], None], run: SlotRun, bounce: memoryview) -> Sequence[int]:
        """One call of the kernel, and the check of what it brought: which blocks are whole."""
        slot_bytes = self._reads.slot_bytes
        pieces: list[memoryview] = []
        begin = 0
        for buffer in run.buffers:
            pages = len(buffer) & _WHOLE_PAGES
            if pages:
                pieces.append(buffer[:pages])
            end = begin + slot_bytes - pages
            pieces.append(bounce[begin:end])
            begin = end
        read(run.first, pieces)
        if self._reads.reader is not None:
            return self._reads.reader.check(run, bounce)
        whole: list[bool] = []
        end = 0
        is_whole = self._reads.seal.is_whole
        for buffer, key, generation in zip(run.buffers, run.keys, run.generations, strict=True):
            pages = len(buffer) & _WHOLE_PAGES
            if pages != len(buffer):
                buffer[pages:] = bounce[end : end + len(buffer) - pages]
            end += slot_bytes - pages
            whole.append(is_whole(bounce, end - HEADER_BYTES, buffer, key, generation))
        return whole

    def _sort_out(self, run: SlotRun, whole: Sequence[int]) -> list[SlotRun]:
        """Count the blocks that are whole; the others."""
        self._reads.breaker.succeeded()
        if all(whole):
            self._good += run.numbers
            self._moved_bytes += sum(map(len, run.buffers))
            return []
        doubtful = []
        for block, is_whole in zip(run.blocks(), whole, strict=True):
            if is_whole:
                self._good += block.numbers
                self._moved_bytes += len(block.buffers[0])
            else:
                doubtful.append(block)
        return doubtful

    def _failed(self, run: SlotRun, error: OSError) -> None:
        reads = self._reads
        gone = isinstance(error, FileNotFoundError)
        lost = gone or isinstance(error, ShortRead)
        if lost:
            reads.breaker.succeeded()  # the disk did answer
        else:
            reads.breaker.failed()
            # A slot that alone cannot be read is lost, unless so many are that it is the disk.
            lost = error.errno == errno.EIO and len(run.keys) == 1 and not reads.breaker.is_open()
        for block, key in enumerate(run.keys):
            reads.on_bad(key, run.location(block), lost)
        timed_out = error.errno == errno.ETIMEDOUT
        self._miss(run, Miss.ABSENT if gone else Miss.TIMEOUT if timed_out else Miss.ERROR)

    def _miss(self, run: SlotRun, reason: str) -> None:
        self._reads.counters.missed(reason, len(run.keys))
        self._transfer.settle_all(run.numbers, False)
