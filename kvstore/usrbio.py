"""Slabs on 3FS through its user-space I/O (USRBIO), past the limits of the FUSE client. Only where it is asked for.

Files are made, opened and listed through the mount; bytes move through rings, one for each thread and direction. A ring
with a read or write that did not end in time is put aside until it does, and its thread gets another.

3FS cannot be installed in CI: its package is no wheel, and its clients need a cluster. Tests use a fake of the package
that is made after 3FS's sources; what the real one does beyond them has not been seen.
"""

import errno
import os
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

from deepinfer_kvstore.backend import Buffers
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.posix import PosixBackend, PosixSlab
from deepinfer_kvstore.usrbio_ring import SHM, Ring

MODULE = "hf3fs_fuse.io"
RING_BYTES = 4 << 20
"""Shared memory of a ring: the most that a thread has under way (3FS#287: queues that are too deep)."""
_KEPT: list[Ring] = []
MAX_ASIDE = 16
"""Rings whose completions did not come. With more of them, nothing is moved until one does."""


class UsrbioSlab:
    """A slab whose file is registered with 3FS. Thread-safe."""

    def __init__(self, slab: PosixSlab, rings: "Rings", io: Any) -> None:
        self.name, self.slot_bytes, self.slots = slab.name, slab.slot_bytes, slab.slots
        self._slab = slab
        self._rings = rings
        self._io = io
        io.register_fd(slab.fd)
        self._registered = True

    def readv(self, first_slot: int, buffers: Buffers) -> None:
        """See `backend.Slab`. A slot that was punched is EIO."""
        self._rings.move(self._slab.fd, first_slot * self.slot_bytes, buffers, read=True)

    def writev(self, first_slot: int, buffers: Buffers) -> None:
        """See `backend.Slab`."""
        self._rings.move(self._slab.fd, first_slot * self.slot_bytes, buffers, read=False)

    def punch(self, first_slot: int, slots: int) -> None:
        """See `backend.Slab`. 3FS takes whole chunks back, so it does nothing where slots are no power of two."""
        if self.slot_bytes & (self.slot_bytes - 1) == 0:
            start = first_slot * self.slot_bytes
            self._io.punch_hole(self._slab.fd, [start], [start + slots * self.slot_bytes])

    def sync(self) -> None:
        """See `backend.Slab`. Written bytes are on several disks already; this is for the length of the file."""
        self._io.force_fsync(self._slab.fd)

    def close(self) -> None:
        """See `backend.Slab`. No call may be under way."""
        if self._registered:
            self._registered = False
            self._io.deregister_fd(self._slab.fd)  # first: 3FS takes another file of this number for this one
            self._slab.close()


class UsrbioBackend:
    """Slabs in a directory of a 3FS mount. Thread-safe."""

    def __init__(self, directory: Path, geometry: Geometry, *, threads: int, timeout_seconds: float) -> None:
        """`threads` will use it at once, for each of which there must be shared memory for two rings.

        Raises:
            StoreConfigError: no package, no 3FS mount, or not enough shared memory (UCM#1282).
        """
        self._io = _package()
        mount = self._io.extract_mount_point(str(directory))
        if mount is None:
            raise StoreConfigError(f"{directory} is not on a 3FS mount: set backend to posix, or root to a path on 3FS")
        ring_bytes = max(RING_BYTES, geometry.slot_bytes)
        found = os.statvfs(SHM)
        if (free := found.f_bavail * found.f_frsize) < (needed := 2 * threads * ring_bytes):
            raise StoreConfigError(
                f"{SHM} has {free} bytes free, {threads} threads need {needed}: make it larger, or lower io_threads"
            )
        self._files = PosixBackend(directory, geometry, direct="off")
        self._rings = Rings(
            lambda read: Ring(self._io, mount, ring_bytes, geometry.slot_bytes, read=read), timeout_seconds
        )

    def create(self, name: str, slot_bytes: int, slots: int) -> UsrbioSlab:
        """See `backend.Backend`."""
        return self._registered(self._files.create(name, slot_bytes, slots))

    def open(self, name: str, *, write: bool) -> UsrbioSlab:
        """See `backend.Backend`."""
        return self._registered(self._files.open(name, write=write))

    def names(self) -> list[str]:
        """See `backend.Backend`."""
        return self._files.names()

    def remove(self, name: str) -> None:
        """See `backend.Backend`."""
        self._files.remove(name)

    def free_bytes(self) -> int:
        """See `backend.Backend`."""
        return self._files.free_bytes()

    def close(self) -> None:
        """See `backend.Backend`."""
        self._rings.close()

    def _registered(self, slab: PosixSlab) -> UsrbioSlab:
        try:
            return UsrbioSlab(slab, self._rings, self._io)
        except BaseException:
            slab.close()
            raise


class Rings:
    """A ring for each thread and direction, made when it is first needed. Thread-safe."""

    def __init__(self, make: Callable[[bool], Ring], timeout_seconds: float) -> None:
        """`make(read)` makes a ring."""
        self._make = make
        self._timeout_seconds = timeout_seconds
        self._own = threading.local()
        self._all: list[Ring] = []
        self._aside: list[Ring] = []
        self._lock = threading.Lock()

    def move(self, fd: int, offset: int, buffers: Buffers, *, read: bool) -> None:
        """See `Ring.move`.

        Raises:
            OSError: also EBUSY, while too many rings wait for completions.
        """
        own: dict[bool, Ring] = self._own.__dict__.setdefault("rings", {})
        ring = own.get(read)
        if ring is None:
            ring = own[read] = self._new(read)
        try:
            ring.move(fd, offset, buffers, monotonic() + self._timeout_seconds)
        except BaseException:
            if ring.due:
                del own[read]
                with self._lock:
                    self._all = [other for other in self._all if other is not ring]
                    self._aside.append(ring)
            raise

    def close(self) -> None:
        """Let go of the rings. One with completions due is kept for as long as the process lives."""
        with self._lock:
            rings, self._all = self._all, []
            for ring in rings:
                ring.close()
            self._drain()
            _KEPT.extend(self._aside)

    def _new(self, read: bool) -> Ring:
        with self._lock:
            self._drain()
            if len(self._aside) >= MAX_ASIDE:
                raise OSError(errno.EBUSY, f"3FS: {len(self._aside)} rings wait for completions that do not come")
        ring = self._make(read)
        with self._lock:
            self._all.append(ring)
        return ring

    def _drain(self) -> None:
        still = []
        for ring in self._aside:
            if _is_drained(ring):
                ring.close()
            else:
                still.append(ring)
        self._aside = still


def _is_drained(ring: Ring) -> bool:
    try:
        return ring.drain()
    except OSError:
        return False


def _package() -> Any:
    try:
        return import_module(MODULE)
    except ImportError as error:
        raise StoreConfigError(
            f"backend 'usrbio' needs {MODULE} ({error}), a package built from the sources of 3FS: install it,"
            " or set backend to posix, which works on the same mount"
        ) from error
