"""Reads of many files at once from one thread: Linux's own asynchronous I/O, for files opened with O_DIRECT.

Two system calls start all reads and wait for as many as are needed. Threads would do the same at some 50 µs of
processor time for each read, ten times what the read costs.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable, Sequence
from threading import Lock

_IOCB = struct.Struct("<QIIHhIQQqQII")  # <linux/aio_abi.h>
_EVENT = struct.Struct("<QQqq")
_PREAD = 0
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # io_setup, _destroy, _getevents, _submit

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Read:
    """One read of a whole range of a file."""

    __slots__ = ("address", "end", "fd", "length", "offset")

    def __init__(self, fd: int, address: int, length: int, offset: int, end: Callable[[bool], None]) -> None:
        """
        Args:
            address: Where to in memory, at a page; `length` and `offset` are of whole pages too.
            end: Called, by the thread that waits then, when nothing writes there any more; with whether all came.
        """
        self.fd, self.address, self.length, self.offset, self.end = fd, address, length, offset, end


class Ring:
    """Reads under way. Not thread-safe; its user may change."""

    def __init__(self, entries: int) -> None:
        """Room for `entries` reads at once.

        Raises:
            OSError: the system has no asynchronous I/O, forbids it, or has no more of it.
        """
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, "no asynchronous I/O known for this architecture")
        _, self._destroy, self._getevents, self._submit = numbers
        self._context = ctypes.c_ulong(0)
        _checked(_libc.syscall(numbers[0], entries, ctypes.byref(self._context)))
        self._entries = entries
        self._under_way: dict[int, Read] = {}
        self._next = 0
        self._blocks = ctypes.create_string_buffer(entries * _IOCB.size)
        self._pointers = (ctypes.c_void_p * entries)()
        self._events = ctypes.create_string_buffer(entries * _EVENT.size)

    @property
    def room(self) -> int:
        """How many more reads may be started."""
        return self._entries - len(self._under_way)

    @property
    def idle(self) -> bool:
        """Whether no read is under way."""
        return not self._under_way

    def start(self, reads: Sequence[Read]) -> int:
        """Start reads, at most `room` of them; how many of the first were."""
        base = ctypes.addressof(self._blocks)
        names = range(self._next, self._next + len(reads))
        for slot, (name, read) in enumerate(zip(names, reads, strict=True)):
            _IOCB.pack_into(
                self._blocks, slot * _IOCB.size,
                name, 0, 0, _PREAD, 0, read.fd, read.address, read.length, read.offset, 0, 0, 0,
            )  # fmt: skip
            self._pointers[slot] = base + slot * _IOCB.size
        started = max(int(_libc.syscall(self._submit, self._context, len(reads), self._pointers)), 0)
        self._under_way.update(zip(names[:started], reads, strict=False))
        self._next += len(reads)
        return started

    def wait(self, least: int, seconds: float) -> None:
        """Call `end` of the reads that ended, once `least` did or after `seconds`."""
        nanoseconds = max(int(seconds * 1e9), 0)
        limit = _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
        found = _libc.syscall(
            self._getevents, self._context, min(least, len(self._under_way)), self._entries, self._events,
            ctypes.byref(limit),
        )  # fmt: skip
        for number in range(max(found, 0)):
            name, _, moved, _ = _EVENT.unpack_from(self._events, number * _EVENT.size)
            read = self._under_way.pop(name)
            read.end(moved == read.length)

    def close(self) -> None:
        """Waits for the reads under way. Idempotent."""
        if self._context.value:
            _libc.syscall(self._destroy, self._context)
            self._context.value = 0


class Rings:
    """Rings for several threads. Thread-safe."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._free: list[Ring] = []
        self._refused = False
        self._lock = Lock()

    def take(self) -> Ring | None:
        """A ring for one user, with what its last user did not wait for; None if the system gives none."""
        with self._lock:
            ring = self._free.pop() if self._free else None
        if ring is not None:
            ring.wait(0, 0.0)
            return ring
        if self._refused:
            return None
        try:
            return Ring(2 * self._entries)
        except OSError:
            self._refused = True
            return None

    def give_back(self, ring: Ring) -> None:
        """What was started and not waited for goes on, and is noticed by the next user."""
        with self._lock:
            self._free.append(ring)

    def close(self) -> None:
        """Give the idle rings to the system. One with a read that hangs cannot be: it ends with the process."""
        with self._lock:
            rings, self._free = self._free, []
        for ring in rings:
            ring.wait(0, 0.0)
            if ring.idle:
                ring.close()


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
