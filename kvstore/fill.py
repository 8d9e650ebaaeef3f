"""How full a store is: its slots against its capacity, and the file system that they lie on."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import NamedTuple

MEASURE_SECONDS = 5.0
"""Disks are looked at this often: on a network file system each slab is a question."""


class Disk(NamedTuple):
    """A file system."""

    total_bytes: int = 0
    """Used, or to be had; 0: there is none to speak of."""
    used_bytes: int = 0
    """By whomever."""
    own_bytes: int = 0
    """By slabs."""


@dataclass(frozen=True)
class Fill:
    """What watermarks are compared with."""

    slot_bytes: int
    """Bytes that a slot takes on one disk."""
    used_blocks: int
    """Slots that hold blocks, of all writers."""
    capacity_blocks: int
    disk: Disk = Disk()

    @property
    def disk_used_bytes(self) -> int:
        """Bytes of the disk in use, but for slots that the store can write again: slabs are reserved whole."""
        return self.disk.used_bytes - max(0, self.disk.own_bytes - self.used_blocks * self.slot_bytes)


class Disks:
    """The file systems under some directories of slabs. Thread-safe."""

    def __init__(self, directories: Sequence[Path], clock: Callable[[], float] = monotonic) -> None:
        self._directories = directories
        self._clock = clock
        self._lock = Lock()
        self._fullest = Disk()
        self._measure_at = clock()

    def fullest(self) -> Disk:
        """The fullest of them, as of the last few seconds. One that cannot be read is left out."""
        with self._lock:
            if self._clock() >= self._measure_at:
                self._fullest = max(map(_measure, self._directories), key=_share, default=Disk())
                self._measure_at = self._clock() + MEASURE_SECONDS
            return self._fullest


def _measure(directory: Path) -> Disk:
    try:
        found = os.statvfs(directory)
        with os.scandir(directory) as files:
            own_bytes = sum(file.stat(follow_symlinks=False).st_blocks * 512 for file in files)
    except OSError:
        return Disk()
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    return Disk(used + found.f_bavail * found.f_frsize, used, own_bytes)  # as df counts: what is reserved is neither


def _share(disk: Disk) -> float:
    return disk.used_bytes / disk.total_bytes if disk.total_bytes else 0.0
