"""From the callers' buffers into slots: neighbouring blocks in one write, visible once the journal has them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import NamedTuple

from deepinfer_kvstore.breaker import Breaker
from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.geometry import HEADER_BYTES, PAGE_BYTES
from deepinfer_kvstore.header import Seal
from deepinfer_kvstore.holdings import Holdings
from deepinfer_kvstore.io import IoThreads
from deepinfer_kvstore.keys import KEY_BYTES, Key
from deepinfer_kvstore.publisher import Publication, Publisher
from deepinfer_kvstore.record import Op, Record
from deepinfer_kvstore.slabs import OpenSlabs, slab_name
from deepinfer_kvstore.slots import Run
from deepinfer_kvstore.stats import Counters, Drop
from deepinfer_kvstore.transfer import Transfer

PARENT_BYTES = 8


@dataclass(frozen=True)
class Put:
    """One block to store."""

    key: Key
    buffer: memoryview
    """Its bytes: neither changed nor freed before the transfer is done."""
    parent: bytes
    """First 8 bytes of the hash of the block before it in the chain; zeros for the first block."""
    depth: int
    """Tokens from the start of the sequence to the end of this block."""

    def __post_init__(self) -> None:
        """Raises:
        ValueError: what no header could hold.
        """
        if len(self.key) != KEY_BYTES or len(self.parent) != PARENT_BYTES or not 0 <= self.depth < 1 << 32:
            raise ValueError(
                f"key of {len(self.key)} bytes (must be {KEY_BYTES}), parent of {len(self.parent)} ({PARENT_BYTES}),"
                f" depth {self.depth} (less than 2**32)"
            )


class Labels(NamedTuple):
    """What the blocks of one put have in common."""

    ttl_class: int
    tenant: int
    created_ms: int


class Stores:
    """Writes blocks. Thread-safe."""

    def __init__(
        self,
        threads: IoThreads,
        slabs: OpenSlabs,
        seal: Seal,
        counters: Counters,
        breaker: Breaker,
        publisher: Publisher,
        holdings: Callable[[], Holdings],
        *,
        slot_bytes: int,
        run_slots: int,
        max_inflight_bytes: int,
        fsync: bool,
    ) -> None:
        """`holdings()` are those of now: an identity that was lost is followed by another. A thread is given at most
        `run_slots` blocks at once."""
        self.slabs = slabs
        self.seal = seal
        self.counters = counters
        self.breaker = breaker
        self.publisher = publisher
        self.holdings = holdings
        self.slot_bytes = slot_bytes
        self.fsync = fsync
        self._threads = threads
        self._limit = run_slots
        self._max_inflight_bytes = max_inflight_bytes
        self._lock = Lock()
        self._inflight_bytes = 0
        self._waiters: dict[Key, list[tuple[Transfer, int, int]]] = {}

    @property
    def inflight_bytes(self) -> int:
        """Payload bytes that were accepted and are not settled."""
        return self._inflight_bytes

    def start(self, blocks: Sequence[tuple[int, Put]], labels: Labels, transfer: Transfer) -> None:
        """Write the blocks, given with their numbers in `transfer`, or drop those for which there is no room.

        From the first one for which there is none all are dropped: a later block is of no use without it.
        """
        accepted: list[Put] = []
        dropped: list[int] = []
        reason = Drop.QUEUE
        with self._lock:
            for number, put in blocks:
                length = len(put.buffer)
                if waiters := self._waiters.get(put.key):  # another put of this block is under way: share its fate
                    waiters.append((transfer, number, length))
                elif dropped or self._inflight_bytes + length > self._max_inflight_bytes:
                    dropped.append(number)
                elif not 0 < length <= self.slot_bytes - HEADER_BYTES:
                    reason = Drop.LENGTH
                    dropped.append(number)
                else:
                    self._waiters[put.key] = [(transfer, number, length)]
                    self._inflight_bytes += length
                    accepted.append(put)
        if dropped:
            self.counters.drop(reason, len(dropped))
            for number in dropped:
                transfer.settle(number, False)
        for at in range(0, len(accepted), self._limit):
            self._threads.submit(_StoreRun(self, accepted[at : at + self._limit], labels, transfer.deadline))

    def settle(self, puts: Sequence[Put], *, ok: bool) -> None:
        """End blocks, for all who put them."""
        with self._lock:
            waiters = [self._waiters.pop(put.key) for put in puts]
            self._inflight_bytes -= sum(len(put.buffer) for put in puts)
        self.counters.duplicate(sum(len(those) - 1 for those in waiters) if ok else 0)
        for those in waiters:
            for transfer, number, length in those:
                transfer.settle(number, ok, length)

    def drop(self, puts: Sequence[Put], reason: Drop) -> None:
        """End blocks that are not stored."""
        self.counters.drop(reason, len(puts))
        self.settle(puts, ok=False)


class _StoreRun:
    """Some neighbouring blocks of one put. A `Job`."""

    is_store = True

    def __init__(self, stores: Stores, puts: list[Put], labels: Labels, deadline: float) -> None:
        self.deadline = deadline
        self._stores = stores
        self._puts = puts
        self._labels = labels

    def run(self, bounce: memoryview) -> None:
        stores, puts = self._stores, self._puts
        if not stores.breaker.admit():
            return stores.drop(puts, Drop.BREAKER)
        holdings = stores.holdings()
        if not holdings.held():
            return stores.drop(puts, Drop.LEASE)
        try:
            runs = holdings.take(len(puts))
        except OSError:
            stores.breaker.failed()
            return stores.drop(puts, Drop.ERROR)
        reason = Drop.FULL
        for number, run in enumerate(runs):
            some, puts = puts[: run.slots], puts[run.slots :]
            if not self._write(holdings, run, some, bounce):  # what comes behind is of no use without it
                for left in runs[number + 1 :]:
                    holdings.slots.give_back(left)
                reason = Drop.ERROR
                break
        if puts:
            stores.drop(puts, reason)

    def expire(self) -> None:
        self._stores.drop(self._puts, Drop.TIMEOUT)

    def overran(self) -> None:
        self._stores.breaker.failed()

    def _write(self, holdings: Holdings, run: Run, puts: list[Put], bounce: memoryview) -> bool:
        """Whole pages from the callers' buffers, the last part of each payload and its header from `bounce`.

        Returns whether they are written; else they are dropped.
        """
        stores, labels = self._stores, self._labels
        began = monotonic()
        records: list[Record] = []
        buffers: list[memoryview] = []
        at = 0
        for number, put in enumerate(puts):
            length = len(put.buffer)
            entry = Entry(
                holdings.fill(run, number), length, put.parent, put.depth,
                labels.created_ms, labels.created_ms, labels.ttl_class, labels.tenant,
            )  # fmt: skip
            whole = length // PAGE_BYTES * PAGE_BYTES
            rest = bounce[at : at + stores.slot_bytes - whole]
            at += len(rest)
            rest[: length - whole] = put.buffer[whole:]
            rest[length - whole : -HEADER_BYTES] = bytes(len(rest) - (length - whole) - HEADER_BYTES)
            stores.seal.write(rest[-HEADER_BYTES:], put.key, entry, put.buffer)
            buffers += (put.buffer[:whole], rest) if whole else (rest,)
            records.append(Record(Op.PUT, put.key, entry))
        try:
            with stores.slabs.use(slab_name(run.writer, run.slab), write=True) as slab:
                slab.writev(run.first, buffers)
                if stores.fsync:
                    slab.sync()
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            # Somebody has removed the slab, or put something else in its place; the disk is not to blame.
            holdings.slots.lose(run.writer, run.slab)
            stores.drop(puts, Drop.ERROR)
            return False
        except OSError:
            stores.breaker.failed()
            holdings.slots.give_back(run)
            stores.drop(puts, Drop.ERROR)
            return False
        stores.breaker.succeeded()
        seconds = monotonic() - began

        def published(kept: int) -> None:
            for record in records[kept:]:
                holdings.slots.retire(record.entry.location)
            if puts[kept:]:
                stores.drop(puts[kept:], Drop.ERROR)
            stores.counters.stored(kept, sum(len(put.buffer) for put in puts[:kept]), seconds)
            stores.settle(puts[:kept], ok=True)

        stores.publisher.publish(Publication(records, published))
        return True
