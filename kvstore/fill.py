"""How full a store is: its slots against its capacity, and the file system that they lie on."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fill:
    """What watermarks are compared with."""

    slot_bytes: int
    used_blocks: int
    """Slots that hold blocks, of all writers."""
    capacity_blocks: int
    disk_bytes: int = 0
    """Size of the file system; 0 where there is none."""
    disk_used_bytes: int = 0
    """Bytes of it that are in use, by whomever, but for slots that the store can write again."""

    @classmethod
    def measure(cls, directories: Iterable[Path], slot_bytes: int, used_blocks: int, capacity_bytes: int) -> "Fill":
        """The fill of a store whose slabs lie in `directories`; of several file systems the fullest counts.

        One that cannot be read is left out: no collection could relieve it.
        """
        fullest = (0, 0)
        for directory in directories:
            try:
                found = os.statvfs(directory)
                with os.scandir(directory) as files:
                    own_bytes = sum(file.stat(follow_symlinks=False).st_blocks * 512 for file in files)
            except OSError:
                continue
            total = found.f_blocks * found.f_frsize
            used = total - found.f_bavail * found.f_frsize
            writable_again = max(0, own_bytes - used_blocks * slot_bytes)
            fullest = max(fullest, (total, used - writable_again), key=_share)
        return cls(slot_bytes, used_blocks, capacity_bytes // slot_bytes, *fullest)


def _share(disk: tuple[int, int]) -> float:
    return disk[1] / disk[0] if disk[0] else 0.0
