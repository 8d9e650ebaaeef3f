"""A process that stores blocks and ends itself with SIGKILL at a named point: `python crashing_writer.py DIR POINT`."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.posix import PosixBackend
from deepinfer_kvstore.record import RECORD_BYTES
from deepinfer_kvstore.store import Store
from faulty_backend import FaultyBackend
from store_case import SLAB_SLOTS, SLOT, descriptor, key, open_store, put

BEFORE = range(10)
"""Blocks that are visible before the crash."""
DURING = range(10, 16)
"""Blocks of the put during which it comes; with them the first slab is full."""


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(wanted: str, act: Callable[[], None] = die) -> Callable[[str, str, int], None]:
    return lambda call, slab, slot: act() if call == wanted else None


def tear_slots(slabs: Path) -> None:
    """Half of the bytes of every slot of the second half of the slab, then death."""
    (slab,) = slabs.iterdir()
    with slab.open("r+b") as file:
        for slot in range(len(BEFORE), SLAB_SLOTS):
            file.seek(slot * SLOT)
            file.write(os.urandom(SLOT // 2))
    die()


def tear_journal(store: Store, slabs: Path) -> None:
    """One record and a half, then death."""

    def append(records: list[Any]) -> int:
        journal = slabs.parent / "journals" / str(store._held().writer.journal.name)
        with journal.open("ab") as file:
            file.write(b"".join(record.pack() for record in records)[: RECORD_BYTES + RECORD_BYTES // 2])
        die()
        return 0

    store._held().writer.journal.append = append  # type: ignore[method-assign, assignment]


def after(owner: Any, name: str) -> None:
    """Death right after a method."""
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **more: (real(*args, **more), die()))


def main(tmp_path: Path, point: str) -> None:
    """Store `BEFORE`, then die at `point` of storing `DURING`, or of deleting `BEFORE`."""
    slabs = tmp_path / "root" / descriptor().directory / "slabs"
    slabs.mkdir(parents=True, exist_ok=True)
    disk = FaultyBackend(PosixBackend(slabs, Geometry(SLOT, SLAB_SLOTS)))
    store = open_store(tmp_path, backend=disk)
    assert all(put(store, BEFORE))
    store._publisher.sync(10)
    journal = store._held().writer.journal
    arm: dict[str, Callable[[], None]] = {
        "before the write": lambda: setattr(disk, "before", at("writev")),
        "amid the write": lambda: setattr(disk, "before", at("writev", lambda: tear_slots(slabs))),
        "after the write": lambda: setattr(disk, "after", at("writev")),
        "after a new slab": lambda: setattr(disk, "after", at("create")),
        "amid the journal": lambda: tear_journal(store, slabs),
        "after the journal": lambda: after(journal, "append"),
        "after the index": lambda: after(store.index, "sync"),
        "when visible": lambda: None,
        "after a deletion": lambda: after(journal, "append"),
    }
    if point == "after a new slab":
        put(store, range(50, 56))
    arm[point]()
    if point == "after a deletion":
        store.delete([key(number) for number in BEFORE])
        store.sync()
    else:
        put(store, DURING)
    die()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
