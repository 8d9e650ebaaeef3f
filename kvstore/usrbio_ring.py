"""A ring of 3FS's user-space I/O, and the shared memory that its reads and writes pass through.

One thread uses a ring. It copies between the memory and its callers' buffers, so that a completion that comes after its
deadline finds nothing but the ring's own memory, which is kept for as long as completions are due.
"""

import errno
import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from mmap import mmap
from pathlib import Path
from time import monotonic
from typing import Any

from deepinfer_kvstore.backend import Buffers

SHM = Path("/dev/shm")
FORBID_READ_HOLES = 2
"""Flag of a ring: reading what was punched is an error, not zeros."""
_PAGE_BYTES = 4096


class Ring:
    """Reads or writes of one thread, at most `memory_bytes` under way. Not thread-safe."""

    def __init__(self, io: Any, mount: str, memory_bytes: int, part_bytes: int, *, read: bool) -> None:
        """`io` is the module `hf3fs_fuse.io`; a transfer is cut into parts of `part_bytes` (one chunk of 3FS).

        Raises:
            OSError: no shared memory, or no ring (3FS#214).
        """
        self._read = read
        self._part_bytes = part_bytes
        self._memory_bytes = memory_bytes // part_bytes * part_bytes
        self._due = 0
        shared = _Shared(self._memory_bytes)
        try:
            self._memory = shared.buf
            self._iov = io.make_iovec(shared, mount, part_bytes)
            entries = self._memory_bytes // part_bytes
            flags = FORBID_READ_HOLES if read else 0
            self._ring = io.make_ioring(mount, entries, read, 0, flags=flags)
        finally:
            shared.unlink()  # 3FS has it open by now, and a process that is killed leaves nothing behind

    @property
    def due(self) -> int:
        """Completions that are still to come."""
        return self._due

    def move(self, fd: int, offset: int, buffers: Buffers, deadline: float) -> None:
        """Read into `buffers`, or write them, from `offset` of a registered file on.

        Raises:
            OSError: not all of it moved, or not before `deadline` (ETIMEDOUT). If completions are `due` then, the ring
                must not be used any more, but for `drain`.
        """
        left = [buffer.cast("B") for buffer in buffers]
        while left:
            some, left = _split(left, self._memory_bytes)
            length = sum(buffer.nbytes for buffer in some)
            if not self._read:
                _gather(some, self._memory)
            self._transfer(fd, offset, length, deadline)
            if self._read:
                _scatter(self._memory, some)
            offset += length

    def drain(self) -> bool:
        """Take completions that came late; whether none is due any more."""
        while self._due:
            late = self._ring.wait(max_results=self._due, min_results=0, timeout=timedelta(0))
            if not late:
                break
            self._due -= len(late)
        return not self._due

    def close(self) -> None:
        """Only when no completion is due: 3FS writes into the memory until then."""
        self._iov = self._ring = None

    def _transfer(self, fd: int, offset: int, length: int, deadline: float) -> None:
        wanted: list[int] = []
        try:
            for at in range(0, length, self._part_bytes):
                size = min(self._part_bytes, length - at)
                self._ring.prepare(self._iov[at : at + size], self._read, fd, offset + at, len(wanted))
                wanted.append(size)
                self._due += 1
        finally:
            self._ring.submit()  # what was prepared must end, whatever became of the others
        failure: OSError | None = None
        while self._due:
            seconds = max(deadline - monotonic(), 0.0)
            ended = self._ring.wait(max_results=self._due, min_results=self._due, timeout=timedelta(seconds=seconds))
            self._due -= len(ended)
            for each in ended:
                failure = failure or _failure(each.result, wanted[each.userdata])
            if self._due and monotonic() >= deadline:
                raise OSError(errno.ETIMEDOUT, f"3FS: {self._due} of {len(wanted)} parts did not come in time")
        if failure:
            raise failure


class _Shared:
    """Memory that 3FS opens by its name, reserved so that touching it never fails (3FS#296).

    It has of `multiprocessing.shared_memory` what 3FS's package asks for, and no process that watches over it.
    """

    def __init__(self, size: int) -> None:
        self.name = f"deepinfer-{secrets.token_hex(8)}"
        path = SHM / self.name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            self.buf = memoryview(mmap(fd, size))
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        for at in range(0, size, _PAGE_BYTES):
            self.buf[at] = 0  # 3FS pins the pages when it is told of them

    def unlink(self) -> None:
        (SHM / self.name).unlink(missing_ok=True)


def _failure(result: int, wanted: int) -> OSError | None:
    """EIO whatever 3FS says: one part failed, the others may be well."""
    if result == wanted:
        return None
    said = os.strerror(-result) if result < 0 else f"{result} of {wanted} bytes"
    return OSError(errno.EIO, f"3FS: {said}")


def _split(buffers: Sequence[memoryview], limit: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `limit` bytes, and the rest."""
    first: list[memoryview] = []
    for number, buffer in enumerate(buffers):
        if buffer.nbytes > limit:
            return [*first, *([buffer[:limit]] if limit else [])], [buffer[limit:], *buffers[number + 1 :]]
        first.append(buffer)
        limit -= buffer.nbytes
    return first, []


def _gather(buffers: Sequence[memoryview], memory: memoryview) -> None:
    at = 0
    for buffer in buffers:
        memory[at : at + buffer.nbytes] = buffer
        at += buffer.nbytes


def _scatter(memory: memoryview, buffers: Sequence[memoryview]) -> None:
    at = 0
    for buffer in buffers:
        buffer[:] = memory[at : at + buffer.nbytes]
        at += buffer.nbytes
