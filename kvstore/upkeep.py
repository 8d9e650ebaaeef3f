"""What a writer does for its slabs: gives back empty ones, punches freed slots, buries the dead, misses the lost.

Run now and then on the thread that collects. Nothing here is in the way of a put or a get.
"""

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from time import monotonic

from deepinfer_kvstore.backend import Backend
from deepinfer_kvstore.fill import Fill
from deepinfer_kvstore.holdings import EPOCH_SHIFT, Holdings
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.retention import Retention
from deepinfer_kvstore.slabs import OpenSlabs, parse_slab_name, slab_name
from deepinfer_kvstore.slots import Run, SlabId
from deepinfer_kvstore.writer import Claims

SWEEP_SECONDS = 30.0
"""Pause between two looks for slabs that dead writers left empty."""
PRESSED_SLOTS = 1024
"""On a disk that is too full, so many free slots are punched in each step, in turn; puts cannot have them meanwhile."""

_log = logging.getLogger(__name__)


class Upkeep:
    """The upkeep of one store. For one thread."""

    def __init__(
        self,
        holdings: Callable[[], Holdings],
        claims: Claims,
        backend: Backend,
        slabs: OpenSlabs,
        index: Index,
        *,
        sync: Callable[[], object],
        fill: Callable[[], Fill],
        retention: Retention,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`holdings()` are those of now: an identity that was lost is followed by another."""
        self._holdings = holdings
        self._claims = claims
        self._backend = backend
        self._slabs = slabs
        self._index = index
        self._sync = sync
        self._fill = fill
        self._retention = retention
        self._clock = clock
        self._sweep_at = clock() + SWEEP_SECONDS
        self._left_empty: set[SlabId] = set()
        self._missing: set[SlabId] = set()
        self._lacking: dict[int, float] = {}  # writers without a lease, since when

    def step(self) -> None:
        """To be called about once a second.

        Raises:
            OSError: a slab could not be removed or punched; the next step begins anew.
        """
        holdings = self._holdings()
        disk_presses = self._retention.presses(self._fill().disk)
        holdings.slots.hold_rested = self._retention.reclaim == "punch" or disk_presses
        if disk_presses:
            self._punch(holdings, holdings.slots.take(PRESSED_SLOTS))
        self._punch(holdings, holdings.slots.rested())
        holdings.give_back(self._slabs.forget)
        if self._clock() >= self._sweep_at:
            self._sweep_at = self._clock() + SWEEP_SECONDS
            found = set(filter(None, map(parse_slab_name, self._backend.names())))
            self._lose(holdings, found)
            self._restore(found, holdings.owners())
            self._sweep(found, holdings.owners())

    def _punch(self, holdings: Holdings, runs: list[Run]) -> None:
        """Give the storage of slots back, and then free them."""
        try:
            for run in runs:
                with self._slabs.use(slab_name(run.writer, run.slab), write=True) as slab:
                    slab.punch(run.first, run.slots)
        finally:
            for run in runs:
                holdings.slots.give_back(run)

    def _lose(self, holdings: Holdings, found: set[SlabId]) -> None:
        """Forget slabs of ours that somebody has removed, seen so twice: an open file would take blocks for ever."""
        missing = {slab for slab in holdings.slots.slabs() if slab not in found}
        again, self._missing = missing & self._missing, missing
        for slab in again:
            _log.warning("kv store: %s is gone, and what it held", slab_name(*slab))
            self._slabs.forget(slab_name(*slab))
            holdings.slots.lose(*slab)  # another may have its name from now on

    def _restore(self, found: set[SlabId], own: Collection[int]) -> None:
        """Write leases anew that somebody has removed: else the slabs of their writers would be nobody's for ever."""
        now = self._clock()
        lacking = {writer for writer, _ in found if writer not in own and self._claims.lacks(writer)}
        self._lacking = {writer: self._lacking.get(writer, now) for writer in lacking}
        for writer, since in self._lacking.items():
            if now - since >= self._claims.lease_s:
                lives = (self._index.lives_of(*slab).values() for slab in found if slab[0] == writer)
                epoch = max((generation >> EPOCH_SHIFT for slots in lives for generation, _ in slots), default=0)
                if self._claims.restore(writer, epoch):
                    _log.warning("kv store: writer %08x had no lease: its slabs can be taken over now", writer)

    def _sweep(self, found: set[SlabId], own: Collection[int]) -> None:
        """Remove slabs that dead writers left without blocks, seen so twice: an index may just be rebuilt."""
        empty = {slab for slab in found if slab[0] not in own and not self._index.slots_of(*slab)}
        if self._index.needs_rebuild:
            empty = set()
        again, self._left_empty = empty & self._left_empty, empty
        for dead in {writer for writer, _ in again}:
            writer = self._claims.adopt(dead, of_any_length=True)
            if writer is None:  # it lives
                continue
            try:
                self._sync()
                for slab in again:
                    if slab[0] == dead and not self._index.slots_of(*slab) and not self._index.needs_rebuild:
                        self._slabs.forget(slab_name(*slab))
                        self._backend.remove(slab_name(*slab))
                        _log.info("kv store: removed %s, left empty by a writer that ended", slab_name(*slab))
            finally:
                with suppress(OSError):
                    writer.release()
