"""What this process may write: its identity, those of dead writers that it took over, their slabs, and the slots."""

from collections.abc import Callable
from itertools import count
from math import inf
from threading import Lock
from time import monotonic

from deepinfer_kvstore.backend import Backend
from deepinfer_kvstore.compaction import Compactor
from deepinfer_kvstore.entry import Location
from deepinfer_kvstore.gc import Need
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.slabs import parse_slab_name, slab_name
from deepinfer_kvstore.slots import Run, Slots
from deepinfer_kvstore.writer import Claims, Writer

FULL_PAUSE_S = 1.0
"""After a slab could not be made, so long passes before the next attempt."""
NEED_SHARE = 16
"""Of a writer's slots, this part is collected when none is free."""
EPOCH_SHIFT = 32
"""A generation is the epoch, and below it a count."""


class Holdings:
    """The slabs of this process. Thread-safe.

    It writes journals and new slabs under its first identity. Further ones, of writers that died, are taken over when
    slots are wanting: otherwise nobody could use the space of a node that is gone.
    """

    def __init__(
        self,
        writer: Writer,
        backend: Backend,
        index: Index,
        geometry: Geometry,
        *,
        capacity_bytes: int,
        grow_below_bytes: float,
        disk_room: Callable[[], float] = lambda: inf,
        quarantine_seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Use `take_up`, which knows what is live.

        A slab is added while those of all writers are not above `grow_below_bytes`, for a writer without slabs also
        above it, and within `capacity_bytes` and `disk_room()`, in bytes.
        """
        self.writer = writer
        self.compactor = Compactor(writer.journal, index, self.held)
        self.slots = Slots(quarantine_seconds, clock)
        self._writers = {writer.id: writer}
        self._is_short = False
        self._refused = False
        self._backend = backend
        self._geometry = geometry
        self._capacity_bytes = capacity_bytes
        self._grow_below_bytes = grow_below_bytes
        self._disk_room = disk_room
        self._clock = clock
        self._counter = count(1)
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
        grow_below_bytes: float,
        disk_room: Callable[[], float] = lambda: inf,
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
            capacity_bytes=capacity_bytes, grow_below_bytes=grow_below_bytes, disk_room=disk_room,
            quarantine_seconds=quarantine_seconds, clock=clock,
        )  # fmt: skip
        try:
            held._take_slabs(writer, index, journals)
        except BaseException:
            writer.release()
            raise
        return held

    def owners(self) -> list[int]:
        """Our identities."""
        return list(self._writers)

    def held(self) -> bool:
        """Whether all of our identities are still ours."""
        return all(writer.held() for writer in list(self._writers.values()))

    def beat(self) -> None:
        """Show that this process lives, and keep the journals short; to be called several times a lease."""
        for writer in list(self._writers.values()):
            writer.beat()
        self.compactor.keep_short(self.owners()[1:])

    def adopt(self, claims: Claims, index: Index, journals: JournalSet) -> bool:
        """If slots are wanting, take the slabs of a dead writer over; whether there was one.

        Raises:
            OSError: the root cannot be written.
        """
        if not self._is_short:
            return False
        self._is_short = False
        writer = claims.adopt(of_any_length=True)
        if writer is None:
            return False
        self._writers[writer.id] = writer
        try:
            self._take_slabs(writer, index, journals)
        except BaseException:  # or nobody could use its slabs while this process lives
            del self._writers[writer.id]
            writer.release()
            raise
        return True

    def release(self) -> None:
        """Let other processes go on with our identities. Idempotent."""
        for writer in self._writers.values():
            writer.release()

    def take(self, slots: int) -> list[Run]:
        """Up to `slots` free slots, in few runs; from a new slab where the old ones are full.

        Raises:
            OSError: none is free, and a new slab could not be made.
        """
        runs: list[Run] = []
        left = slots
        while left:
            taken = self.slots.take(left)
            left -= sum(run.slots for run in taken)
            runs += taken
            try:
                if left and not self._grow():
                    self._refused = True
                    break
            except OSError:
                if not runs:
                    raise
                break
        return runs

    def fill(self, run: Run, slot: int) -> Location:
        """The location of the block that slot number `slot` of a taken run is to hold."""
        generation = self._writers[run.writer].epoch << EPOCH_SHIFT | next(self._counter)
        location = Location(run.writer, run.slab, run.first + slot, generation)
        self.slots.fill(location)
        return location

    def need(self) -> Need | None:
        """What this writer lacks: a part of its slots, but for those that will be free once they have rested."""
        free, taken, resting = self.slots.counts()
        self._refused &= not free
        if not self._refused or not taken:
            return None
        blocks = max(1, self._geometry.slab_slots // NEED_SHARE, (taken + resting) // NEED_SHARE) - resting
        return Need(self.owners(), blocks) if blocks > 0 else None

    def give_back(self, forget: Callable[[str], None]) -> None:
        """Remove slabs without blocks, all but one. `forget(name)` closes one: another may soon have its name.

        Raises:
            OSError: a slab could not be removed. It is no longer ours; whoever claims our identity next has it.
        """
        for writer, slab in self.slots.empty()[1:]:
            if self.slots.remove(writer, slab):
                forget(slab_name(writer, slab))
                self._backend.remove(slab_name(writer, slab))

    def _take_slabs(self, writer: Writer, index: Index, journals: JournalSet) -> None:
        # From here on the index keeps for us which slots are freed, so none is missed between the two calls.
        index.sync(journals, self.owners())
        for owner, slab in filter(None, map(parse_slab_name, self._backend.names())):
            if owner == writer.id:
                live = [(slot, generation) for slot, _, generation in index.slots_of(owner, slab)]
                self.slots.add(owner, slab, writer.slab_slots, live)

    def _grow(self) -> bool:
        with self._growing:
            if self.slots.counts()[0]:
                return True  # another thread was faster
            if self._clock() < self._full_until:
                return False
            self._full_until = self._clock() + FULL_PAUSE_S
            names = self._backend.names()
            slab_bytes, used = self._geometry.slab_bytes, len(names) * self._geometry.slab_bytes
            room = min(self._capacity_bytes - used, self._backend.free_bytes(), self._disk_room())
            if room < slab_bytes or (used > self._grow_below_bytes and self.slots.slabs()):
                self._is_short = True
                return False
            # Numbers are used again, or what index and journals know of deleted slots would grow for ever.
            taken = {*filter(None, map(parse_slab_name, names)), *self.slots.slabs()}
            for number in (number for number in count() if (self.writer.id, number) not in taken):
                try:
                    slab = self._backend.create(
                        slab_name(self.writer.id, number), self._geometry.slot_bytes, self._geometry.slab_slots
                    )
                except FileExistsError:
                    continue
                slab.close()
                self.slots.add(self.writer.id, number, self._geometry.slab_slots)
                self._full_until = 0.0
                break
            return True
