"""What this process may write: its identity, its slabs, and their slots."""

from collections.abc import Callable
from itertools import count
from threading import Lock
from time import monotonic

from deepinfer_kvstore.backend import Backend
from deepinfer_kvstore.compaction import Compactor
from deepinfer_kvstore.entry import Location
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal import JournalSet
from deepinfer_kvstore.slabs import parse_slab_name, slab_name
from deepinfer_kvstore.slots import Run, Slots
from deepinfer_kvstore.writer import Claims, Writer

FULL_PAUSE_S = 1.0
"""After a slab could not be made, so long passes before the next attempt."""
_COUNTER_BITS = 32


class Holdings:
    """One identity's slabs. Thread-safe."""

    def __init__(
        self,
        writer: Writer,
        backend: Backend,
        index: Index,
        geometry: Geometry,
        *,
        capacity_bytes: int,
        quarantine_seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`capacity_bytes` bounds the slabs of all writers. Use `take_up`, which knows what is live."""
        self.writer = writer
        self.compactor = Compactor(writer.journal, index, writer.held)
        self.slots = Slots(geometry.slab_slots, quarantine_seconds, clock)
        self._backend = backend
        self._geometry = geometry
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._counter = count(1)
        self._next_slab = 0
        self._full_until = 0.0
        self._growing = Lock()

    @classmethod
    def take_up(
        cls,
        claims: Claims,
        backend: Backend,
        index: Index,
        journals: JournalSet,
        geometry: Geometry,
        *,
        capacity_bytes: int,
        quarantine_seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> "Holdings":
        """Claim an identity, and go on with its slabs: what the journals do not know to be live is free.

        Raises:
            OSError: the root cannot be written.
        """
        writer = claims.claim()
        held = cls(
            writer, backend, index, geometry,
            capacity_bytes=capacity_bytes, quarantine_seconds=quarantine_seconds, clock=clock,
        )  # fmt: skip
        try:
            # From here on the index keeps for us which slots are freed, so none is missed between the two calls.
            index.sync(journals, owner=writer.id)
            for owner, slab in filter(None, map(parse_slab_name, backend.names())):
                if owner == writer.id:
                    live = [(slot, generation) for slot, _, generation in index.slots_of(owner, slab)]
                    held.slots.add(owner, slab, live)
                    held._next_slab = max(held._next_slab, slab + 1)
        except BaseException:
            writer.release()
            raise
        return held

    def take(self, slots: int) -> list[Run]:
        """Up to `slots` free slots, in few runs; from a new slab where the old ones are full.

        Raises:
            OSError: a new slab was needed and could not be made.
        """
        runs: list[Run] = []
        left = slots
        try:
            while left:
                taken = self.slots.take(left)
                left -= sum(run.slots for run in taken)
                runs += taken
                if left and not self._grow():
                    break
        except OSError:
            for run in runs:
                self.slots.give_back(run)
            raise
        return runs

    def fill(self, run: Run, slot: int) -> Location:
        """The location of the block that slot number `slot` of a taken run is to hold."""
        generation = self.writer.epoch << _COUNTER_BITS | next(self._counter)
        location = Location(run.writer, run.slab, run.first + slot, generation)
        self.slots.fill(location)
        return location

    def _grow(self) -> bool:
        with self._growing:
            if self.slots.counts()[0]:
                return True  # another thread was faster
            if self._clock() < self._full_until:
                return False
            self._full_until = self._clock() + FULL_PAUSE_S
            room = self._capacity_bytes - len(self._backend.names()) * self._geometry.slab_bytes
            if min(room, self._backend.free_bytes()) < self._geometry.slab_bytes:
                return False
            while True:
                number = self._next_slab
                self._next_slab += 1
                try:
                    slab = self._backend.create(
                        slab_name(self.writer.id, number), self._geometry.slot_bytes, self._geometry.slab_slots
                    )
                except FileExistsError:
                    continue
                slab.close()
                self.slots.add(self.writer.id, number)
                self._full_until = 0.0
                return True
