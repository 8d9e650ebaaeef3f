"""From slots into the callers' buffers: neighbouring slots in one read, each block checked for itself."""

import errno
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from deepinfer_kvstore.backend import ShortRead, Slab
from deepinfer_kvstore.breaker import Breaker
from deepinfer_kvstore.entry import Location
from deepinfer_kvstore.geometry import HEADER_BYTES, PAGE_BYTES
from deepinfer_kvstore.header import Flaw, Seal
from deepinfer_kvstore.io import IoThreads
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.run_reader import RunReader
from deepinfer_kvstore.slabs import OpenSlabs, slab_name
from deepinfer_kvstore.stats import Counters, Miss
from deepinfer_kvstore.transfer import Transfer

MAX_SLOTS_PER_CALL = 512
"""Two buffers each, of the 1024 that Linux takes at once."""
CACHED_CALL_BYTES = 512 << 10
"""Of one call where the page cache has the bytes: the checksum then finds them in the CPU's cache."""
_WHOLE_PAGES = -PAGE_BYTES

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
        on_bad: Callable[[Key, Location, bool], None],
        *,
        slot_bytes: int,
        run_bytes: int,
        call_bytes: int,
    ) -> None:
        """
        Args:
            on_bad: Told key and location of blocks that could not be loaded, and whether it is for good.
            run_bytes: Most bytes that one thread is given at once.
            call_bytes: Most bytes in one call of the kernel.
        """
        self.slabs = slabs
        self.seal = seal
        self.counters = counters
        self.breaker = breaker
        self.on_bad = on_bad
        self.slot_bytes = slot_bytes
        self._threads = threads
        self.call_slots = max(1, min(call_bytes // slot_bytes, MAX_SLOTS_PER_CALL))
        self.reader = RunReader.make(seal.prefix, slot_bytes, self.call_slots) if seal.is_plain else None
        """None: Python does it."""
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
    """Blocks in neighbouring slots on their way to one transfer. A `Job`."""

    is_store = False

    def __init__(self, loads: Loads, wanted: list[Wanted], transfer: Transfer) -> None:
        self.deadline = transfer.deadline
        self._loads = loads
        self._wanted = wanted
        self._transfer = transfer
        self._good: list[int] = []
        self._moved_bytes = 0
        self._verify = False

    def run(self, bounce: memoryview) -> None:
        loads = self._loads
        if not loads.breaker.admit():
            return self._miss(self._wanted, Miss.BREAKER)
        began = monotonic()
        bad = self._read(self._wanted, bounce)
        if bad:  # the open slab may be one that was removed, another having its name by now
            loads.slabs.forget(slab_name(bad[0][0][0].writer, bad[0][0][0].slab))
            self._verify = True  # or one part of it was bad, which the other parts can tell
            bad = [still for block, _ in bad for still in self._read([block], bounce)]
        for block, flaw in bad:
            # A MAC may be wrong because this process has the wrong secret.
            loads.on_bad(block[2], block[0], flaw != Flaw.MAC)
            self._miss([block], flaw)
        loads.counters.loaded(len(self._good), self._moved_bytes, monotonic() - began)
        self._transfer.settle_all(self._good, True, self._moved_bytes)

    def expire(self) -> None:
        self._miss(self._wanted, Miss.TIMEOUT)

    def overran(self) -> None:
        self._loads.breaker.failed()

    def _read(self, wanted: list[Wanted], bounce: memoryview) -> list[tuple[Wanted, Flaw]]:
        """Read all; those that are not what was expected. What cannot be read is missed here."""
        loads = self._loads
        bad: list[tuple[Wanted, Flaw]] = []
        at = 0
        try:
            with loads.slabs.use(slab_name(wanted[0][0].writer, wanted[0][0].slab)) as slab:
                if (failed := self._compiled(slab, wanted, bounce)) is not None:
                    return failed
                for at in range(0, len(wanted), loads.call_slots):
                    some = wanted[at : at + loads.call_slots]
                    try:
                        bad += self._call(slab, some, bounce)
                    except OSError as error:
                        if error.errno != errno.EIO:
                            raise
                        if len(some) == 1:
                            self._failed(some, error)
                        else:  # perhaps of one slot only
                            bad += [flawed for block in some for flawed in self._read([block], bounce)]
        except OSError as error:
            self._failed(wanted[at:], error)
        return bad

    def _call(self, slab: Slab, wanted: list[Wanted], bounce: memoryview) -> list[tuple[Wanted, Flaw]]:
        """One call of the kernel, and the check of what it brought; the blocks that fail it.

        Payloads go into the buffers up to their last whole page; what is left, and the header, into `bounce`. So a
        page-aligned buffer can be read past the page cache, though payloads are not whole pages.
        """
        slot_bytes = self._loads.slot_bytes
        buffers: list[memoryview] = []
        at = 0
        for _, _, _, buffer in wanted:
            whole = len(buffer) & _WHOLE_PAGES
            if whole:
                buffers.append(buffer[:whole])
            end = at + slot_bytes - whole
            buffers.append(bounce[at:end])
            at = end
        read = slab.readv if self._verify else getattr(slab, "readv_unverified", slab.readv)
        read(wanted[0][0].slot, buffers)
        self._loads.breaker.succeeded()
        good: list[int] = []
        bad: list[tuple[Wanted, Flaw]] = []
        seal = self._loads.seal
        is_whole = seal.is_whole
        at = 0
        for location, number, key, buffer in wanted:
            length = len(buffer)
            whole = length & _WHOLE_PAGES
            if whole != length:
                buffer[whole:] = bounce[at : at + length - whole]
            at += slot_bytes - whole
            if is_whole(bounce, at - HEADER_BYTES, buffer, key, location[3]):
                good.append(number)
                self._moved_bytes += length
            else:
                flaw = seal.flaw(bounce[at - HEADER_BYTES : at], buffer, key, location[3])
                bad.append(((location, number, key, buffer), flaw or Flaw.HEADER))
        self._good += good
        return bad

    def _compiled(self, slab: Slab, wanted: list[Wanted], bounce: memoryview) -> list[tuple[Wanted, Flaw]] | None:
        """`_call` for all of a run, in C where it can be; None where it cannot, or the kernel refused something."""
        loads = self._loads
        fd = getattr(slab, "read_fd", None)
        if loads.reader is None or fd is None:
            return None
        locations, numbers, keys, buffers = zip(*wanted, strict=True)
        found = loads.reader.read(fd, locations[0].slot, keys, [each[3] for each in locations], buffers, bounce)
        if found is None:
            return None
        loads.breaker.succeeded()
        if all(found):
            self._good += numbers
            self._moved_bytes += sum(map(len, buffers))
            return []
        bad: list[tuple[Wanted, Flaw]] = []
        end = 0
        for block, whole in zip(wanted, found, strict=True):
            location, number, key, buffer = block
            end += loads.slot_bytes - (len(buffer) & _WHOLE_PAGES)
            if whole:
                self._good.append(number)
                self._moved_bytes += len(buffer)
            else:
                flaw = loads.seal.flaw(bounce[end - HEADER_BYTES : end], buffer, key, location[3])
                bad.append((block, flaw or Flaw.HEADER))
        return bad

    def _failed(self, wanted: list[Wanted], error: OSError) -> None:
        loads = self._loads
        gone = isinstance(error, FileNotFoundError)
        lost = gone or isinstance(error, ShortRead)
        if lost:
            loads.breaker.succeeded()  # the disk did answer
        else:
            loads.breaker.failed()
            # A slot that alone cannot be read is lost, unless so many are that it is the disk.
            lost = error.errno == errno.EIO and len(wanted) == 1 and not loads.breaker.is_open()
        for location, _, key, _ in wanted:
            loads.on_bad(key, location, lost)
        timed_out = error.errno == errno.ETIMEDOUT
        self._miss(wanted, Miss.ABSENT if gone else Miss.TIMEOUT if timed_out else Miss.ERROR)

    def _miss(self, wanted: Sequence[Wanted], reason: str) -> None:
        self._loads.counters.missed(reason, len(wanted))
        self._transfer.settle_all([number for _, number, _, _ in wanted], False)
