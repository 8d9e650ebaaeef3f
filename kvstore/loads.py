"""Finds blocks, and has neighbouring ones read together into the callers' buffers by the threads."""

import os
from collections.abc import Callable, Sequence
from math import ceil

from deepinfer_kvstore.backend import flat
from deepinfer_kvstore.entry import Place
from deepinfer_kvstore.io import IoThreads
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.load_run import LoadRun, Reads
from deepinfer_kvstore.slot_run import runs_of
from deepinfer_kvstore.stats import Miss
from deepinfer_kvstore.transfer import Transfer


class Loads:
    """Reads blocks. Thread-safe."""

    def __init__(
        self,
        threads: IoThreads,
        reads: Reads,
        places: Callable[[Sequence[Key]], list[Place | None]],
        on_absent: Callable[[Key], None],
        run_slots: int,
        crowded_run_slots: int,
    ) -> None:
        """
        Args:
            places: Finds blocks; what it does not find is `None`. Without I/O on the root.
            on_absent: Told keys that are not found.
            run_slots: Most blocks that one thread is given at once.
            crowded_run_slots: The same while each core has a read already: where reads are copies, and not waits for a
                disk, more of them at once gain nothing, and each costs.
        """
        self.reads = reads
        self._threads = threads
        self._places = places
        self._on_absent = on_absent
        self._most, self._most_crowded = run_slots, crowded_run_slots
        self._cores = len(os.sched_getaffinity(0))

    def start(self, keys: Sequence[Key], buffers: Sequence[memoryview], transfer: Transfer) -> None:
        """Read the blocks `keys` into `buffers`, and settle them in `transfer`. Those that are not there are missed."""
        buffers = list(map(flat, buffers))
        places, lengths = self._places(keys), list(map(len, buffers))
        numbers: Sequence[int] = range(len(keys))
        if lengths != [place and place[3] for place in places]:
            absent = [number for number in numbers if places[number] is None]
            for number in absent:
                # Perhaps a gap in its chain that a search for the longest prefix has passed over.
                self._on_absent(keys[number])
            self.miss(absent, Miss.ABSENT, transfer)
            there = [(number, place) for number, place in enumerate(places) if place]
            self.miss([n for n, place in there if place[3] != lengths[n]], Miss.LENGTH, transfer)
            numbers = [n for n, place in there if place[3] == lengths[n]]
        if numbers:
            runs = runs_of(numbers, places, keys, buffers, self._run_slots(len(numbers)))
            self._threads.submit_loads([LoadRun(self.reads, run, transfer) for run in runs])

    def _run_slots(self, blocks: int) -> int:
        """Most blocks that a thread is given at once, so that all of some blocks are given out in equal parts."""
        most = self._most if self._threads.active() < self._cores else self._most_crowded
        return ceil(blocks / ceil(blocks / most))

    def miss(self, numbers: Sequence[int], reason: Miss, transfer: Transfer) -> None:
        """Blocks of `transfer` are not loaded."""
        if numbers:
            self.reads.counters.missed(reason, len(numbers))
            transfer.settle_all(numbers, False)
