"""Looking at the slots of a namespace: whether they hold what the index says, and what the index does not know of."""

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from enum import StrEnum
from random import Random
from typing import NamedTuple

from deepinfer_kvstore.backend import Backend
from deepinfer_kvstore.entry import Entry, Location, wall_ms
from deepinfer_kvstore.geometry import HEADER_BYTES
from deepinfer_kvstore.header import Flaw, Seal
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.keys import HASH_BYTES, Key, make_key, schema_of
from deepinfer_kvstore.slabs import parse_slab_name, slab_name

RUN_BYTES = 4 << 20
"""Read at once."""
YOUNG_MS = 60_000
"""A block written so lately may be on its way to its writer's journal."""


class Trouble(StrEnum):
    """Why a block that the index promises is not there, besides the reasons in `Flaw`."""

    NO_SLAB = "no_slab"
    UNREADABLE = "unreadable"
    """The disk says so. It may be back."""
    ZEROS = "zeros"
    """Nothing but zeros with a good header: what wrote it read the wrong memory."""


class Damaged(NamedTuple):
    """A block that the index promises and its slot does not hold."""

    key: Key
    location: Location
    why: Flaw | Trouble


class Orphan(NamedTuple):
    """A whole block that the index has never heard of."""

    key: Key
    entry: Entry


class Inspector:
    """Reads the slabs of one namespace, below what a running engine needs: one call at a time.

    What changes while it looks is looked at again: only what stays wrong is reported.
    """

    def __init__(
        self,
        backend: Backend,
        slot_bytes: int,
        slabs: Callable[[], Mapping[str, int]],
        index: Index,
        seal: Seal,
        sync: Callable[[], object],
    ) -> None:
        """`slabs` says which there are and how many slots each has; `sync` brings `index` up to date.

        A seal without secret checks no MAC.
        """
        self._backend = backend
        self._slot_bytes = slot_bytes
        self._slabs = slabs
        self._index = index
        self._seal = seal
        self._sync = sync
        self._run_slots = max(1, RUN_BYTES // slot_bytes)
        self._buffer = memoryview(mmap.mmap(-1, self._run_slots * slot_bytes))
        self.read = 0
        """Slots looked at."""
        self.intact = 0
        """Blocks of the index that are whole."""

    def everything(self, progress: Callable[[int, int], object]) -> Iterator[Damaged | Orphan]:
        """Read every slot. `progress` is told slots done, and how many there are.

        Raises:
            OSError: the directory cannot be read.
        """
        self._sync()
        slabs = {name: slots for name, slots in sorted(self._slabs().items()) if parse_slab_name(name)}
        total = sum(slabs.values())
        for name, slots in slabs.items():
            before = self.read
            yield from self._slab(name, slots)
            self.read = before + slots
            progress(self.read, total)
        there = {parse_slab_name(name) for name in self._slabs()}
        self._sync()
        for writer, slab in self._index.slabs():
            if (writer, slab) not in there:
                for slot, key, generation in self._index.slots_of(writer, slab):
                    yield Damaged(key, Location(writer, slab, slot, generation), Trouble.NO_SLAB)

    def sample(self, blocks: int, random: Random, progress: Callable[[int, int], object]) -> Iterator[Damaged]:
        """Read up to `blocks` blocks of the index, chosen by chance: hashes are spread evenly."""
        self._sync()
        keys = self._index.totals().keys
        if keys <= blocks:
            chosen = dict(self._index.entries(limit=blocks))
        else:
            chosen = {}
            schemas = sorted(self._schemas())
            for _ in range(blocks):
                start = make_key(random.choice(schemas), random.randbytes(HASH_BYTES))
                chosen.update(self._index.entries(start, 1) or self._index.entries(limit=1))
        suspects: list[Damaged] = []
        for number, (key, entry) in enumerate(sorted(chosen.items(), key=lambda item: item[1].location)):
            if why := self._entry(key, entry):
                suspects.append(Damaged(key, entry.location, why))
            else:
                self.intact += 1
            progress(number + 1, len(chosen))
        self.read += len(chosen)
        self._sync()
        for found in suspects:
            entry_now = self._index.get(found.key)
            if entry_now and entry_now.location == found.location:
                yield found

    def _schemas(self) -> set[int]:
        found: set[int] = set()
        after: Key | None = None
        while entries := self._index.entries(after, 1):
            schema = schema_of(entries[0][0])
            found.add(schema)
            after = make_key(schema, b"\xff" * HASH_BYTES)
        return found

    def _entry(self, key: Key, entry: Entry) -> Flaw | Trouble | None:
        location = entry.location
        try:
            with closing(self._backend.open(slab_name(location.writer, location.slab), write=False)) as slab:
                slab.readv(location.slot, [self._buffer[: self._slot_bytes]])
        except FileNotFoundError:
            return Trouble.NO_SLAB
        except OSError:
            return Trouble.UNREADABLE
        return self._judge(self._buffer[: self._slot_bytes], key, location.generation)

    def _slab(self, name: str, slots: int) -> Iterator[Damaged | Orphan]:
        identity = parse_slab_name(name)
        assert identity is not None
        lives = self._index.lives_of(*identity)
        suspects: list[Damaged | Orphan] = []
        now_ms = wall_ms()
        for slot, view in self._slots(name, slots):
            generation, key = lives.get(slot, (0, None))
            location = Location(*identity, slot, generation)
            if key is not None:
                why = self._judge(view, key, generation) if view else Trouble.UNREADABLE
                if why:
                    suspects.append(Damaged(key, location, why))
                else:
                    self.intact += 1
            elif view and (orphan := self._orphan(view, location, now_ms)):
                suspects.append(orphan)
        suspects += [
            Damaged(key, Location(*identity, slot, generation), Trouble.NO_SLAB)
            for slot, (generation, key) in lives.items()
            if key is not None and slot >= slots
        ]
        if not suspects:
            return
        self._sync()
        now = self._index.lives_of(*identity)
        for found in suspects:
            location = found.location if isinstance(found, Damaged) else found.entry.location
            generation, key = now.get(location.slot, (0, None))
            if isinstance(found, Damaged):
                if (generation, key) == (location.generation, found.key):
                    yield found
            elif generation < location.generation:
                yield found

    def _slots(self, name: str, slots: int) -> Iterator[tuple[int, memoryview | None]]:
        """Number and bytes of each slot; None for one that cannot be read."""
        try:
            slab = self._backend.open(name, write=False)
        except FileNotFoundError:  # collected; `everything` looks for such at its end
            return
        except OSError:
            yield from ((slot, None) for slot in range(slots))
            return
        with closing(slab):
            for first in range(0, slots, self._run_slots):
                count = min(self._run_slots, slots - first)
                run = self._buffer[: count * self._slot_bytes]
                try:
                    slab.readv(first, [run])
                except OSError:
                    yield from self._one_by_one(slab.readv, range(first, first + count))
                    continue
                for number in range(count):
                    yield first + number, run[number * self._slot_bytes : (number + 1) * self._slot_bytes]

    def _one_by_one(
        self, read: Callable[[int, list[memoryview]], None], slots: range
    ) -> Iterator[tuple[int, memoryview | None]]:
        view = self._buffer[: self._slot_bytes]
        for slot in slots:
            try:
                read(slot, [view])
            except OSError:
                yield slot, None
            else:
                yield slot, view

    def _judge(self, slot: memoryview, key: Key, generation: int) -> Flaw | Trouble | None:
        header = self._seal.parse(slot[-HEADER_BYTES:])
        if isinstance(header, Flaw):
            return header
        if header.length > len(slot) - HEADER_BYTES:
            return Flaw.HEADER
        payload = slot[: header.length]
        flaw = self._seal.flaw(slot[-HEADER_BYTES:], payload, key, generation)
        return flaw or (Trouble.ZEROS if not any(payload[:64]) and payload == bytes(len(payload)) else None)

    def _orphan(self, slot: memoryview, location: Location, now_ms: int) -> Orphan | None:
        """The block in a slot of which the index knows no life as late as this one."""
        header = self._seal.parse(slot[-HEADER_BYTES:])
        if isinstance(header, Flaw) or header.generation <= location.generation:
            return None
        if abs(now_ms - header.created_ms) < YOUNG_MS or self._judge(slot, header.key, header.generation):
            return None
        entry = Entry(
            location._replace(generation=header.generation), header.length, header.parent, header.depth,
            header.created_ms, header.created_ms, header.ttl_class, header.tenant,
        )  # fmt: skip
        return Orphan(header.key, entry)
