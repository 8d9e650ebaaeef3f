"""Slabs as files: on a local disk, or on a 3FS mount, whose FUSE client is plain POSIX.

Data go past the page cache (O_DIRECT) where the file system can and memory is aligned, and through it otherwise.
"""

import ctypes
import errno
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from deepinfer_kvstore.backend import Buffers, ShortRead
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import Geometry

Direct = Literal["auto", "on", "off"]

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # <linux/falloc.h>
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)


class PosixSlab:
    """A slab in a file. Thread-safe."""

    def __init__(self, name: str, geometry: Geometry, fd: int, direct_fd: int | None) -> None:
        self.name = name
        self.slot_bytes = geometry.slot_bytes
        self.slots = geometry.slab_slots
        self.fd = fd
        self.direct_fd = direct_fd
        """The file, open past the page cache; None: it goes through it."""

    @property
    def read_fd(self) -> int:
        """What `readv` reads from first."""
        return self.fd if self.direct_fd is None else self.direct_fd

    def readv(self, first_slot: int, buffers: Buffers) -> None:
        """See `backend.Slab`."""
        self._move(os.preadv, first_slot, buffers)

    def writev(self, first_slot: int, buffers: Buffers) -> None:
        """See `backend.Slab`."""
        self._move(os.pwritev, first_slot, buffers)

    def readv_cached(self, first_slot: int, slots: int, buffers: Buffers) -> bool:
        """Fill `buffers` with some slots if all of it lies in the page cache, without waiting; whether it did."""
        try:
            moved = os.preadv(self.fd, buffers, first_slot * self.slot_bytes, os.RWF_NOWAIT)
        except OSError:  # EAGAIN, or the file system cannot say
            return False
        return moved == slots * self.slot_bytes

    def punch(self, first_slot: int, slots: int) -> None:
        """See `backend.Slab`."""
        try:
            _fallocate(
                self.fd, _KEEP_SIZE | _PUNCH_HOLE, first_slot * self.slot_bytes, slots * self.slot_bytes, self.name
            )
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise

    def sync(self) -> None:
        """See `backend.Slab`."""
        os.fdatasync(self.fd)

    def close(self) -> None:
        """See `backend.Slab`. No call may be under way: the number of the file may be another's at once."""
        for fd in (self.fd, self.direct_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.fd, self.direct_fd = -1, None

    def _move(self, call: Callable[[int, Buffers, int], int], first_slot: int, buffers: Buffers) -> None:
        offset = first_slot * self.slot_bytes
        if self.direct_fd is not None:
            try:
                return _whole(call, self.direct_fd, buffers, offset, self.name)
            except OSError as error:
                if error.errno != errno.EINVAL:  # what the kernel says of unaligned memory
                    raise
        _whole(call, self.fd, buffers, offset, self.name)


class PosixBackend:
    """Slabs in a directory. Thread-safe."""

    def __init__(self, directory: Path, geometry: Geometry, *, direct: Direct = "auto") -> None:
        """
        Raises:
            StoreConfigError: `direct` is "on", and the file system of `directory` has no O_DIRECT.
        """
        self._directory = directory
        self._geometry = geometry
        self._direct = direct
        if direct == "on":
            self._require_direct()

    def create(self, name: str, slot_bytes: int, slots: int) -> PosixSlab:
        """See `backend.Backend`."""
        path = self._directory / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _fallocate(fd, 0, 0, slot_bytes * slots, name)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                os.ftruncate(fd, slot_bytes * slots)
            return PosixSlab(name, Geometry(slot_bytes, slots), fd, self._direct_fd(path, os.O_RDWR))
        except BaseException:
            os.close(fd)
            path.unlink()
            raise

    def open(self, name: str, *, write: bool) -> PosixSlab:
        """See `backend.Backend`."""
        path = self._directory / name
        access = os.O_RDWR if write else os.O_RDONLY
        fd = os.open(path, access | os.O_CLOEXEC)
        try:
            # 3FS tells a file's length late, so a reader's slab is as long as slabs of this geometry are.
            return PosixSlab(name, self._geometry, fd, self._direct_fd(path, access))
        except BaseException:
            os.close(fd)
            raise

    def names(self) -> list[str]:
        """See `backend.Backend`."""
        return [name for name in os.listdir(self._directory) if name.endswith(".slab")]

    def remove(self, name: str) -> None:
        """See `backend.Backend`."""
        (self._directory / name).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """See `backend.Backend`."""
        found = os.statvfs(self._directory)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """See `backend.Backend`."""

    def _require_direct(self) -> None:
        path = self._directory / f".direct-{secrets.token_hex(8)}"
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600))
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise StoreConfigError(
                    f"{self._directory}: the file system has no O_DIRECT: leave direct at 'auto'"
                ) from error
            # Who may only read finds out when reading.
        finally:
            with suppress(OSError):
                path.unlink()

    def _direct_fd(self, path: Path, access: int) -> int | None:
        if self._direct == "off":
            return None
        try:
            return os.open(path, access | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL or self._direct == "on":
                raise
        _log.warning("%s: no O_DIRECT on this file system, blocks go through the page cache", self._directory)
        self._direct = "off"
        return None


def _whole(call: Callable[[int, Buffers, int], int], fd: int, buffers: Buffers, offset: int, name: str) -> None:
    """Move all of `buffers`, however little the kernel takes at once."""
    left = list(buffers)
    while left:
        some = left[:_IOV_MAX]
        moved = call(fd, some, offset)
        if moved == 0:
            raise ShortRead(errno.EIO, "transfer ended early", name)
        offset += moved
        if moved == sum(map(len, some)):
            del left[: len(some)]
            continue
        passed = 0
        while passed < len(left) and moved >= left[passed].nbytes:
            moved -= left[passed].nbytes
            passed += 1
        del left[:passed]
        if moved:
            left[0] = left[0][moved:]


def _fallocate(fd: int, mode: int, offset: int, length: int, name: str) -> None:
    """fallocate(2): the C library's posix_fallocate would write every page where the file system cannot."""
    if _libc.fallocate64(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
