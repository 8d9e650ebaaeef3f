"""Which slots of our own slabs are free, live, or freed too lately to be written again."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from time import monotonic
from typing import NamedTuple

from deepinfer_kvstore.entry import Location

_FREE, _TAKEN, _QUARANTINED = 0, 1, 2


class Run(NamedTuple):
    """Consecutive slots of one slab."""

    writer: int
    slab: int
    first: int
    slots: int


SlabId = tuple[int, int]
"""Writer and number of a slab."""


class Slots:
    """The slots of the slabs that this process writes. Thread-safe; no call waits.

    A slot whose block is gone rests for `quarantine_seconds`, longer than any read of it may take: a reader that
    looked it up before would otherwise read another block. (It would notice; this saves it the miss.)
    """

    def __init__(self, quarantine_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._quarantine_seconds = quarantine_seconds
        self._clock = clock
        self._states: dict[SlabId, bytearray] = {}
        self._generations: dict[SlabId, array[int]] = {}
        self._free: dict[SlabId, int] = {}
        self._resting: deque[tuple[float, SlabId, int]] = deque()
        self._current: SlabId | None = None
        self._cursor = 0
        self._lock = Lock()
        self.hold_rested = False
        """Whether slots that have rested wait for `rested`, and for `give_back` after it, before they are free."""

    def add(self, writer: int, slab: int, slots: int, live: Iterable[tuple[int, int]] = ()) -> None:
        """A slab of `slots` slots to write to, all of it free but the slots `live`: pairs of slot and generation."""
        states = bytearray(slots)
        generations = array("Q", bytes(8 * slots))
        for slot, generation in live:
            if slot < slots:
                states[slot], generations[slot] = _TAKEN, generation
        with self._lock:
            self._states[writer, slab] = states
            self._generations[writer, slab] = generations
            self._free[writer, slab] = states.count(_FREE)

    def remove(self, writer: int, slab: int) -> bool:
        """Forget a slab, if none of its slots is taken; whether it was."""
        with self._lock:
            states = self._states.get((writer, slab))
            if states is None or _TAKEN in states:
                return False
            self._forget((writer, slab))
            return True

    def lose(self, writer: int, slab: int) -> None:
        """Forget a slab that somebody has removed, whatever it held."""
        with self._lock:
            if (writer, slab) in self._states:
                self._forget((writer, slab))

    def take(self, count: int) -> list[Run]:
        """Up to `count` free slots, in few runs; fewer when there are no more."""
        runs: list[Run] = []
        with self._lock:
            self._release()
            while count:
                run = self._take_run(count)
                if run is None:
                    break
                runs.append(run)
                count -= run.slots
        return runs

    def give_back(self, run: Run) -> None:
        """Free at once slots that were taken and never seen by a reader."""
        with self._lock:
            states = self._states.get((run.writer, run.slab))
            if states is not None:
                states[run.first : run.first + run.slots] = bytes(run.slots)
                self._free[run.writer, run.slab] += run.slots

    def fill(self, location: Location) -> None:
        """Say which block a taken slot holds."""
        with self._lock:
            generations = self._generations.get((location.writer, location.slab))
            if generations is not None:  # else the slab was lost meanwhile
                generations[location.slot] = location.generation

    def retire(self, location: Location) -> bool:
        """Free a slot after quarantine; False if it does not hold the block of that generation (any more)."""
        writer, slab, slot, generation = location
        with self._lock:
            states = self._states.get((writer, slab))
            if states is None or slot >= len(states) or states[slot] != _TAKEN:
                return False
            if self._generations[writer, slab][slot] != generation:
                return False
            states[slot] = _QUARANTINED
            self._resting.append((self._clock() + self._quarantine_seconds, (writer, slab), slot))
            return True

    def rested(self) -> list[Run]:
        """Slots that have rested for long enough, once: to be given back."""
        with self._lock:
            due: dict[SlabId, list[int]] = {}
            for slab, slot in self._due():
                due.setdefault(slab, []).append(slot)
            return [
                Run(*slab, first, last - first + 1)
                for slab, slots in due.items()
                for first, last in _runs(sorted(slots))
            ]

    def taken(self, writer: int, slab: int) -> list[int]:
        """The slots of a slab that are live or being written."""
        with self._lock:
            states = self._states.get((writer, slab), b"")
            return [slot for slot, state in enumerate(states) if state == _TAKEN]

    def slabs(self) -> list[SlabId]:
        """All slabs."""
        with self._lock:
            return list(self._states)

    def empty(self) -> list[SlabId]:
        """Slabs that are free from end to end."""
        with self._lock:
            self._release()
            return [slab for slab, free in self._free.items() if free == len(self._states[slab])]

    def counts(self) -> tuple[int, int, int]:
        """Numbers of free, taken and resting slots."""
        with self._lock:
            self._release()
            free, resting = sum(self._free.values()), len(self._resting)
            return free, sum(map(len, self._states.values())) - free - resting, resting

    def _forget(self, slab: SlabId) -> None:
        del self._states[slab], self._generations[slab], self._free[slab]
        self._resting = deque(item for item in self._resting if item[1] != slab)
        if self._current == slab:
            self._current = None

    def _release(self) -> None:
        if not self.hold_rested:
            for slab, slot in self._due():
                self._states[slab][slot] = _FREE
                self._free[slab] += 1

    def _due(self) -> Iterator[tuple[SlabId, int]]:
        now = self._clock()
        while self._resting and self._resting[0][0] <= now:
            _, slab, slot = self._resting.popleft()
            yield slab, slot

    def _take_run(self, count: int) -> Run | None:
        """The next run from where the last one ended; a shorter one rather than none."""
        if self._current is None or not self._free[self._current]:
            self._current = max(self._free, key=self._free.__getitem__, default=None)
            self._cursor = 0
            if self._current is None or not self._free[self._current]:
                return None
        states = self._states[self._current]
        count = min(count, self._free[self._current])
        while True:
            first = states.find(bytes(count), self._cursor)
            if first < 0 and self._cursor:
                first = states.find(bytes(count))
            if first >= 0:
                break
            count = (count + 1) // 2
        states[first : first + count] = bytes([_TAKEN]) * count
        self._free[self._current] -= count
        self._cursor = first + count
        return Run(*self._current, first, count)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of neighbours."""
    first = previous = None
    for number in numbers:
        if first is None or previous is None:
            first = number
        elif number != previous + 1:
            yield first, previous
            first = number
        previous = number
    if first is not None and previous is not None:
        yield first, previous
