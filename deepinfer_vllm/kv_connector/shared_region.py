"""The host rows of an engine: a file in /dev/shm that every rank and the scheduler map, and that no crash leaks."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import time

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

SHM = Path("/dev/shm")
PREFIX = "vllm_offload_"
OURS = "deepinfer_"
"""What marks our regions: every process that maps one holds a shared lock on it. vLLM's own carry no sign of life."""
_STARTING_SECONDS = 120.0
"""A region this young may belong to an engine that has made it and not locked it yet."""


def hold_region(region: SharedOffloadRegion) -> None:
    """Mark a region as used by this process until it ends or unmaps it."""
    fcntl.flock(region.fd, fcntl.LOCK_SH)


def unlink_region(region: SharedOffloadRegion) -> None:
    """Take the name of a region that all ranks have mapped: its memory then ends with its processes, killed or not."""
    for path in _files(Path(region.mmap_path).name):
        with suppress(FileNotFoundError):
            path.unlink()


def close_region(region: SharedOffloadRegion) -> None:
    """Unmap a region, and remove it where this process made it and it still has a name."""
    region._creator = region._creator and Path(region.mmap_path).exists()
    region.cleanup()


def remove_dead_regions() -> list[Path]:
    """Remove regions of ours whose engine ended before all ranks had mapped them; which ones.

    An engine is alive while anyone, in whatever container, holds its lock. Regions of other connectors stay.
    """
    removed = []
    for path in _files(PREFIX + OURS):
        if path.suffix != ".mmap":
            continue
        with suppress(OSError), path.open("rb") as file:
            if time() - os.fstat(file.fileno()).st_mtime < _STARTING_SECONDS:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for part in _files(path.name):
                part.unlink()
                removed.append(part)
    return removed


def _files(start: str) -> Iterator[Path]:
    return iter(sorted(SHM.glob(f"{start}*")))
