"""Slabs in memory: for tests, and for a node's own memory as the only tier. They end with the process."""

import errno
from mmap import mmap
from threading import Lock

from deepinfer_kvstore.backend import Buffers, ShortRead


class MemorySlab:
    """A slab in an anonymous mapping. Pages cost memory once they are written."""

    def __init__(self, name: str, slot_bytes: int, slots: int) -> None:
        self.name = name
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._view = memoryview(mmap(-1, slot_bytes * slots))

    def readv(self, first_slot: int, buffers: Buffers) -> None:
        """See `backend.Slab`."""
        at = self._start(first_slot, buffers)
        for buffer in buffers:
            buffer[:] = self._view[at : at + buffer.nbytes]
            at += buffer.nbytes

    def writev(self, first_slot: int, buffers: Buffers) -> None:
        """See `backend.Slab`."""
        at = self._start(first_slot, buffers)
        for buffer in buffers:
            self._view[at : at + buffer.nbytes] = buffer
            at += buffer.nbytes

    def punch(self, first_slot: int, slots: int) -> None:
        """See `backend.Slab`."""
        at, length = first_slot * self.slot_bytes, slots * self.slot_bytes
        self._view[at : at + length] = bytes(length)

    def sync(self) -> None:
        """See `backend.Slab`."""

    def close(self) -> None:
        """See `backend.Slab`. The backend keeps the bytes."""

    def _start(self, first_slot: int, buffers: Buffers) -> int:
        start = first_slot * self.slot_bytes
        if start + sum(buffer.nbytes for buffer in buffers) > len(self._view):
            raise ShortRead(errno.EIO, "beyond the end of the slab", self.name)
        return start


class MemoryBackend:
    """Slabs of this process. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` bounds all slabs together."""
        self._limit_bytes = limit_bytes
        self._slabs: dict[str, MemorySlab] = {}
        self._lock = Lock()

    def create(self, name: str, slot_bytes: int, slots: int) -> MemorySlab:
        """See `backend.Backend`."""
        with self._lock:
            if name in self._slabs:
                raise FileExistsError(errno.EEXIST, "slab exists", name)
            if slot_bytes * slots > self._free_bytes():
                raise OSError(errno.ENOSPC, f"slabs would take more than {self._limit_bytes} bytes", name)
            slab = self._slabs[name] = MemorySlab(name, slot_bytes, slots)
            return slab

    def open(self, name: str, *, write: bool) -> MemorySlab:
        """See `backend.Backend`."""
        with self._lock:
            if name not in self._slabs:
                raise FileNotFoundError(errno.ENOENT, "no such slab", name)
            return self._slabs[name]

    def names(self) -> list[str]:
        """See `backend.Backend`."""
        with self._lock:
            return list(self._slabs)

    def remove(self, name: str) -> None:
        """See `backend.Backend`."""
        with self._lock:
            self._slabs.pop(name, None)

    def free_bytes(self) -> int:
        """See `backend.Backend`."""
        with self._lock:
            return self._free_bytes()

    def close(self) -> None:
        """See `backend.Backend`."""

    def _free_bytes(self) -> int:
        return self._limit_bytes - sum(slab.slot_bytes * slab.slots for slab in self._slabs.values())
