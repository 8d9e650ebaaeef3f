"""The store: blocks of one namespace by key, in slabs below a directory that any number of processes share."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

from deepinfer_kvstore.backend import Backend, flat
from deepinfer_kvstore.breaker import Breaker
from deepinfer_kvstore.descriptor import Descriptor
from deepinfer_kvstore.entry import Location, wall_ms
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.eviction import PIN_LIMIT_MS
from deepinfer_kvstore.fill import Disks, Fill
from deepinfer_kvstore.follower import Applied
from deepinfer_kvstore.gc import Collector
from deepinfer_kvstore.gc_lease import GcLease
from deepinfer_kvstore.gc_thread import GcThread
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.header import Seal
from deepinfer_kvstore.holdings import Holdings
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.io import IoThreads
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.load_run import Reads
from deepinfer_kvstore.loads import Loads
from deepinfer_kvstore.network_fs import file_system_type, is_network
from deepinfer_kvstore.opening import Places, check_space, default_index_dir, open_backend, prepare
from deepinfer_kvstore.options import StoreOptions
from deepinfer_kvstore.pace import Pace
from deepinfer_kvstore.publisher import Publication, Publisher
from deepinfer_kvstore.record import Record
from deepinfer_kvstore.run_reader import CACHED_CALL_BYTES, RunReader
from deepinfer_kvstore.slabs import OpenSlabs, max_open
from deepinfer_kvstore.slot_run import MAX_SLOTS_PER_CALL
from deepinfer_kvstore.stats import Counters, Drop, Miss, Stats
from deepinfer_kvstore.stores import Labels, Put, Stores
from deepinfer_kvstore.suspects import Suspects
from deepinfer_kvstore.tenants import tenant_tag
from deepinfer_kvstore.transfer import Transfer
from deepinfer_kvstore.upkeep import Upkeep
from deepinfer_kvstore.writer import Claims

__all__ = ["Put", "Store"]

SUSPECT_SECONDS = 60.0
"""A block that could not be read is not promised again for so long."""
ADOPTION_SECONDS = 1.0
"""Pause between two looks for slabs of dead writers, while slots are wanting."""
GC_SHARE = 0.2
"""Part of its time that the thread which collects may work."""
CROWDED = 8
"""Times `run_bytes` that a thread reads from the page cache at once while all cores do."""
MAX_TOUCHES = 1 << 20
"""Touches kept in memory; of more, the later ones are lost."""

_log = logging.getLogger(__name__)


class Store:
    """One process's access to a namespace. Thread-safe. A forked child's copy only misses and drops.

    After `open` nothing raises for what disks, networks or other writers do: a block is there, or it is a miss. Only
    `close` and `sync` wait for the root.
    """

    @classmethod
    def open(
        cls,
        root: Path | str,
        descriptor: Descriptor,
        options: StoreOptions = StoreOptions(),  # noqa: B008, frozen
        *,
        backend: Backend | None = None,
        clock_ms: Callable[[], int] = wall_ms,
    ) -> "Store":
        """Open the namespace of `descriptor` below directory `root`, making it where it is not there yet.

        `backend` takes the place of the one that the options name. `clock_ms` is Unix time.

        Raises:
            StoreConfigError: root, descriptor or options cannot work; one line with the remedy.
        """
        places, geometry = prepare(Path(root), descriptor, options)
        index_dir = options.index_dir or default_index_dir(Path(root))
        index = Index.open(index_dir / descriptor.directory, descriptor.digest(), root=str(Path(root).resolve()))
        try:
            backend = backend or open_backend(places, geometry, options)
            if not options.read_only:
                check_space(places, geometry, backend)
            return cls(places, descriptor, options, geometry, index, backend, clock_ms)
        except OSError as error:
            index.close()
            raise StoreConfigError(f"root {root} cannot be used ({error}): check owner, mount and space") from error
        except BaseException:
            index.close()
            raise

    def __init__(
        self,
        places: Places,
        descriptor: Descriptor,
        options: StoreOptions,
        geometry: Geometry,
        index: Index,
        backend: Backend,
        clock_ms: Callable[[], int],
    ) -> None:
        """Use `open`."""
        self.descriptor = descriptor
        self.options = options
        self.index = index
        self._backend = backend
        self._clock_ms: Callable[[], int] = lambda: max(0, clock_ms())  # it may jump to before 1970
        self._geometry = geometry
        self._journals = JournalSet(places.journals, descriptor.digest())
        self._claims = Claims(
            places.writers,
            places.journals,
            descriptor.digest(),
            geometry,
            lease_s=options.lease_s,
            shared=any(is_network(file_system_type(root)) for root in places.roots),
        )
        self._disks = Disks(places.disks if options.backend != "memory" else [])
        self._holdings: Holdings | None = None
        if options.read_only:
            index.sync(self._journals)
        else:
            self._holdings = self._take_up()
        self._counters = Counters()
        self._suspects = Suspects(SUSPECT_SECONDS)
        self._touched: dict[Key, tuple[int, int]] = {}
        self._touch_lock = Lock()
        self._next_touch = self._next_beat = self._next_adoption = time.monotonic()
        self._disk_slot_bytes = places.disk_slot_bytes(geometry.slot_bytes)
        self._is_full = False
        self._closed = False
        self._trouble = ""
        self._process = os.getpid()
        self._slabs = OpenSlabs(backend, max_open(places.stripe_set.code.shards if places.stripe_set else 1))
        self._load_breaker = Breaker(options.breaker_failures, options.breaker_pause_s)
        self._store_breaker = Breaker(options.breaker_failures, options.breaker_pause_s)
        self._publisher = Publisher(self._append, self._fold, self._each_round, options.sync_interval_s)
        self._threads = IoThreads(options.io_threads, max(options.run_bytes, geometry.slot_bytes))
        seal = Seal(descriptor.digest(), options.secret)
        run_slots = max(1, options.run_bytes // geometry.slot_bytes)
        cached = options.direct == "off" and not options.ec
        call_bytes = CACHED_CALL_BYTES if cached else options.run_bytes
        call_slots = max(1, min(call_bytes // geometry.slot_bytes, run_slots, MAX_SLOTS_PER_CALL))
        reads = Reads(
            self._slabs, seal, self._counters, self._load_breaker, self._bad, geometry.slot_bytes, call_slots,
            RunReader.make(seal.prefix, geometry.slot_bytes, call_slots) if seal.is_plain else None,
        )  # fmt: skip
        self._loads = Loads(
            self._threads, reads, index.places, self._suspects.add, run_slots, run_slots * (CROWDED if cached else 1)
        )
        self._stores = Stores(
            self._threads, self._slabs, seal, self._counters, self._store_breaker, self._publisher, self._held,
            slot_bytes=geometry.slot_bytes, run_slots=min(run_slots, MAX_SLOTS_PER_CALL),
            max_inflight_bytes=options.max_inflight_bytes, fsync=options.fsync,
        )  # fmt: skip

        self._gc = self._start_gc(places.namespace)

    @property
    def writer(self) -> int | None:
        """Our identity as a writer; None when read-only."""
        return self._holdings.writer.id if self._holdings else None

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each block is there, as far as this node knows. No I/O on the root."""
        if self._load_breaker.is_open():
            return [False] * len(keys)
        return self._there(keys)

    def longest_prefix(self, keys: Sequence[Key]) -> int:
        """How many leading blocks of a chain are there. No I/O on the root."""
        if self._load_breaker.is_open():
            return 0
        found = self.index.longest_prefix(keys)
        if self._suspects:
            return next((number for number in range(found) if keys[number] in self._suspects), found)
        return found

    def get(self, keys: Sequence[Key], buffers: Sequence[memoryview], *, timeout_s: float | None = None) -> Transfer:
        """Load blocks into `buffers`: writable, of the blocks' lengths, page-aligned if they are to be fast.

        What a buffer holds after a miss is undefined.

        Raises:
            ValueError: not as many buffers as keys, or one that cannot be written.
        """
        if any(buffer.readonly for buffer in buffers):
            raise ValueError("a buffer to load into is read-only")
        transfer = Transfer(len(keys), self._deadline(timeout_s))
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys, {len(buffers)} buffers: each block needs one")
        if self._load_breaker.is_open():
            self._loads.miss(range(len(keys)), Miss.BREAKER, transfer)
        else:
            self._loads.start(keys, buffers, transfer)
        return transfer

    def put(
        self, blocks: Sequence[Put], *, ttl_class: str = "", tenant: str = "", timeout_s: float | None = None
    ) -> Transfer:
        """Store blocks of one chain, in its order. A block that is there already is a success at once.

        Blocks for which there is no room, on disk or under way, are dropped at once. `ttl_class` that is not
        configured is the default one.
        """
        transfer = Transfer(len(blocks), self._deadline(timeout_s))
        reason = self._refusal()
        if reason:
            self._counters.drop(reason, len(blocks))
            for number in range(len(blocks)):
                transfer.settle(number, False)
            return transfer
        there = self._there([put.key for put in blocks])
        new = [
            (number, put if (buffer := flat(put.buffer)) is put.buffer else replace(put, buffer=buffer))
            for number, put in enumerate(blocks)
            if not there[number]
        ]
        self._counters.duplicate(len(blocks) - len(new))
        for number, known in enumerate(there):
            if known:
                transfer.settle(number, True)
        if again := [(number, put.key) for number, put in new if put.key in self._suspects]:
            transfer.when_done(lambda done: self._trust(again, done.results()))
        self._stores.start(new, Labels(self._ttl(ttl_class), tenant_tag(tenant), self._clock_ms()), transfer)
        return transfer

    def touch(self, keys: Sequence[Key], ttl_class: str | None = None) -> None:
        """Say that blocks are used. Gathered in memory, and written down every few seconds."""
        now = self._clock_ms()
        ttl = self._ttl(ttl_class) if ttl_class else 0
        with self._touch_lock:
            if self._holdings and len(self._touched) + len(keys) <= MAX_TOUCHES:
                for key in keys:
                    self._touched[key] = now, max(ttl, self._touched.get(key, (0, 0))[1])

    def pin(self, keys: Sequence[Key], seconds: float) -> None:
        """Keep blocks, and those before them in their chains, from collection: on all nodes, from soon on, for so long,
        at most an hour. The last block of a chain is enough.
        """
        until = self._clock_ms() + min(int(seconds * 1000), PIN_LIMIT_MS)
        found = zip(keys, self.index.get_many(keys), strict=True)
        self._publish([Record.touch(key, entry, until) for key, entry in found if entry])

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove blocks, for all readers, soon."""
        found = zip(keys, self.index.get_many(keys), strict=True)
        self._publish([Record.delete(key, entry.location) for key, entry in found if entry])

    def sync(self, timeout_s: float | None = None) -> bool:
        """Bring the index up to date with all journals now. Waits, by default at most `io_timeout_s`; whether it is."""
        return self._publisher.sync(self.options.io_timeout_s if timeout_s is None else timeout_s)

    def stats(self) -> Stats:
        """What it has counted since it was opened."""
        stats = self._counters.stats(
            queue_depth=self._threads.waiting(),
            inflight_bytes=self._stores.inflight_bytes,
            used_bytes=self.index.used_slots() * self._geometry.slot_bytes,
            capacity_bytes=self.options.capacity_bytes,
        )
        if not self.options.ec:
            return stats
        coded: Any = self._backend
        return replace(stats, degraded_roots=len(coded.degraded()), coded=coded.counters.totals())

    def close(self) -> None:
        """End what is under way, within `io_timeout_s`, and let another process go on with our slabs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._process != os.getpid():  # threads are the parent's, and so are lease and slabs
            return
        collected = self._gc is None or self._gc.close(self.options.io_timeout_s)
        quiet = collected & self._threads.close(self.options.io_timeout_s)
        self._publisher.sync(self.options.io_timeout_s)
        quiet &= self._publisher.close(self.options.io_timeout_s)
        if not quiet:
            _log.warning("kv store: an I/O call has not returned: its slabs stay ours until this process ends")
            return
        self._slabs.close()
        self._backend.close()
        if self._holdings:
            self._holdings.release()
            self._holdings.compactor.wait(self.options.io_timeout_s)
        self._journals.close()
        self.index.close()

    def _there(self, keys: Sequence[Key]) -> list[bool]:
        found = self.index.contains(keys)
        if self._suspects:
            return [there and key not in self._suspects for there, key in zip(found, keys, strict=True)]
        return found

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.options.io_timeout_s if timeout_s is None else timeout_s)

    def _held(self) -> Holdings:
        assert self._holdings is not None, "a read-only store accepts no puts"
        return self._holdings

    def _take_up(self) -> Holdings:
        return Holdings.take_up(
            self._claims, self._backend, self.index, self._journals, self._geometry,
            capacity_bytes=self.options.capacity_bytes,
            grow_below_bytes=self.options.capacity_bytes * self.options.retention.high,
            disk_room=lambda: self.options.retention.room_bytes(self._disks.fullest()),
            quarantine_seconds=2 * self.options.io_timeout_s,
        )  # fmt: skip

    def _ttl(self, ttl_class: str) -> int:
        numbers, default = self.options.retention.numbers, self.options.retention.default_class
        if ttl_class and ttl_class not in numbers:
            self._counters.unknown_class()
        return numbers.get(ttl_class, numbers[default])

    def _start_gc(self, namespace: Path) -> GcThread | None:
        if self.options.collect_interval_s is None or self._holdings is None:
            return None
        collector = Collector(
            self.index, GcLease(namespace, self.options.lease_s), self.options.retention,
            append=self._append_now, sync=self.sync, fill=self._fill, need=lambda: self._held().need(),
            lease_s=self.options.lease_s, pace=Pace(GC_SHARE), wall=lambda: self._clock_ms() / 1000,
        )  # fmt: skip
        upkeep = Upkeep(
            self._held, self._claims, self._backend, self._slabs, self.index,
            sync=self.sync, fill=self._fill, retention=self.options.retention,
        )  # fmt: skip
        return GcThread(collector, upkeep, self.options.collect_interval_s, self._counters.collected)

    def _fill(self) -> Fill:
        slot_bytes = self._geometry.slot_bytes
        used = self.index.used_slots()
        return Fill(self._disk_slot_bytes, used, self.options.capacity_bytes // slot_bytes, self._disks.fullest())

    def _refusal(self) -> Drop | None:
        if self._holdings is None or self._closed or self._process != os.getpid():
            return Drop.READ_ONLY
        if self._is_full:
            return Drop.FULL
        return Drop.BREAKER if self._store_breaker.is_open() else None

    def _bad(self, key: Key, location: Location, for_good: bool) -> None:
        """Promise a block that could not be loaded no more: nobody, if it is lost for good; else not here, for a while.

        A lost block that stayed in the index could never be stored again.
        """
        self._suspects.add(key)
        if for_good:
            self._publish([Record.delete(key, location)])

    def _trust(self, keys: Sequence[tuple[int, Key]], stored: Sequence[bool]) -> None:
        """Promise again what was stored again."""
        for number, key in keys:
            if stored[number]:
                self._suspects.clear(key)

    def _publish(self, records: Sequence[Record]) -> None:
        if records and self._holdings:
            self._publisher.publish(Publication(records, lambda _: None))

    def _append_now(self, records: Sequence[Record]) -> None:
        """Publish, and wait until it is.

        Raises:
            OSError: it is not, or not all of it, within `io_timeout_s`.
        """
        kept: SimpleQueue[int] = SimpleQueue()
        self._publisher.publish(Publication(records, kept.put))
        try:
            if kept.get(timeout=self.options.io_timeout_s) == len(records):
                return
        except Empty:
            pass
        raise OSError(f"the journal did not take {len(records)} records in {self.options.io_timeout_s} s")

    def _append(self, records: Sequence[Record]) -> int:
        """Append to our journal: all records, or the first few of them."""
        holdings = self._held()
        if not holdings.held():
            return 0
        journal = holdings.writer.journal
        try:
            kept = journal.append(records)
            if self.options.fsync:
                journal.sync()
        except OSError as error:
            self._store_breaker.failed()
            if str(error) != self._trouble:  # once while it stays the same
                self._trouble = str(error)
                _log.warning("kv store: journal %s: %s: what it does not take is a miss", journal.name, error)
            return 0
        self._trouble = ""
        return kept

    def _fold(self) -> Applied:
        holdings = self._holdings
        applied = self.index.sync(self._journals, holdings.owners() if holdings else ())
        if holdings:
            for location in applied.freed:
                holdings.slots.retire(location)
        return applied

    def _each_round(self) -> None:
        self._is_full = self.options.retention.is_full(self._fill())
        now = time.monotonic()
        if self._holdings is None:
            return
        if now >= self._next_beat:
            self._next_beat = now + self.options.lease_s / 4
            self._holdings.beat()
        if not self._holdings.held():
            self._begin_anew()
        if now >= self._next_adoption:
            self._next_adoption = now + ADOPTION_SECONDS
            self._adopt()
        if now >= self._next_touch:
            self._next_touch = now + self.options.touch_interval_s
            self._write_touches()

    def _begin_anew(self) -> None:
        """Another process took us for dead and has our identity: go on as another."""
        lost = self._held()
        try:
            self._holdings = self._take_up()
        except OSError as error:
            _log.warning("kv store: no new writer identity: %s", error)
            return
        _log.warning("kv store: writer %08x was taken over, now %08x", lost.writer.id, self._holdings.writer.id)
        lost.release()

    def _adopt(self) -> None:
        try:
            if self._held().adopt(self._claims, self.index, self._journals):
                _log.info("kv store: the slabs of a writer that ended are ours now")
        except OSError as error:
            _log.warning("kv store: no slabs can be taken over: %s", error)

    def _write_touches(self) -> None:
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        entries = self.index.get_many(list(touched))
        self._publish(
            [
                Record.touch(key, entry, at, ttl)
                for (key, (at, ttl)), entry in zip(touched.items(), entries, strict=True)
                if entry
            ]
        )
