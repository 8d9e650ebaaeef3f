"""What `hf3fs_fuse.io` does, as far as its sources say, over a plain directory; and what goes wrong with it.

Not a 3FS: there is no such thing in CI. It is as strict as the real one, and stricter where that would corrupt: files
must be registered, rings have one direction and one thread, parts must lie in one block of the memory.
"""

import errno
import os
import threading
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

MAX_PUNCHED = 1000


class FakeHf3fs:
    """Takes the place of the module. Its attributes say what is to go wrong from now on."""

    def __init__(self, mount: Path) -> None:
        self.mount = mount
        (mount / "3fs-virt" / "iovs").mkdir(parents=True)
        self.registered: dict[int, Path] = {}
        self.iovecs: list[Iovec] = []
        self.rings: list[Ioring] = []
        self.punched: list[tuple[int, int]] = []
        self.synced = 0
        self.held = False
        """Nothing ends until `release`."""
        self.lost = 0
        """So many completions never come."""
        self.short = 0
        """So many parts move only half of their bytes, and say so."""
        self.torn = 0
        """So many writes leave half of their bytes, and say that all is well."""
        self.failing = 0
        """So many parts fail, with EIO."""
        self.refuse: set[str] = set()
        """Functions that raise."""
        self.changed = threading.Condition()

    def release(self) -> None:
        """Let what was held end."""
        with self.changed:
            self.held = False
            self.changed.notify_all()

    def extract_mount_point(self, path: str) -> str | None:
        return str(self.mount) if Path(path).resolve().is_relative_to(self.mount.resolve()) else None

    def make_iovec(self, shm: Any, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> "Iovec":
        self._may("make_iovec")
        target = Path("/dev/shm") / shm.name
        assert target.stat().st_size == len(shm.buf)
        iovec = Iovec(self, shm.buf, block_size)
        iovec.link.symlink_to(target)
        self.iovecs.append(iovec)
        return iovec

    def make_ioring(
        self,
        hf3fs_mount_point: str,
        entries: int,
        for_read: bool = True,
        io_depth: int = 0,
        priority: int | None = None,
        timeout: int | None = None,
        numa: int = -1,
        flags: int = 0,
    ) -> "Ioring":
        self._may("make_ioring")
        assert hf3fs_mount_point == str(self.mount)
        assert io_depth == 0, "others may wait for ever for more to be prepared"
        self.rings.append(Ioring(self, entries, for_read, flags))
        return self.rings[-1]

    def register_fd(self, fd: int, flags: int = 0) -> None:
        self._may("register_fd")
        if fd in self.registered:
            raise OSError(errno.EINVAL, "registered already")
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not path.is_relative_to(self.mount.resolve()):
            raise OSError(errno.EBADF, "no file of 3FS")
        self.registered[fd] = path

    def deregister_fd(self, fd: int) -> None:
        del self.registered[fd]

    def force_fsync(self, fd: int) -> None:
        assert fd in self.registered
        self.synced += 1

    def punch_hole(self, fd: int, start: list[int], end: list[int], flags: int = 0) -> None:
        self._may("punch_hole")
        assert len(start) == len(end) <= MAX_PUNCHED
        assert fd in self.registered
        self.punched += zip(start, end, strict=True)

    def _may(self, name: str) -> None:
        if name in self.refuse:
            raise OSError(errno.ENOMEM, f"{name} is refused")


class Iovec:
    """Registered memory."""

    def __init__(self, fake: FakeHf3fs, buf: memoryview, block_size: int) -> None:
        self.buf, self.block_size = buf, block_size
        self.link = fake.mount / "3fs-virt" / "iovs" / f"{uuid4()}.b{block_size}"

    def __getitem__(self, part: slice) -> "Part":
        start, stop, step = part.indices(len(self.buf))
        assert step == 1
        if self.block_size:
            assert start // self.block_size == (stop - 1) // self.block_size, "a part spans two blocks"
        return Part(self.buf[start:stop])


class Part:
    """A piece of registered memory, and later the result."""

    def __init__(self, buf: memoryview) -> None:
        self.buf = buf
        self.result = 0
        self.userdata: Any = None


class Ioring:
    """A ring."""

    def __init__(self, fake: FakeHf3fs, entries: int, for_read: bool, flags: int) -> None:
        self._fake, self._entries, self._for_read = fake, entries, for_read
        self._forbid_holes = bool(flags & 2)
        self._thread: int | None = None
        self._prepared: list[tuple[Part, int, int]] = []
        self._submitted: deque[tuple[Part, int, int]] = deque()
        self._lost = 0

    def prepare(self, iov: Part, read: bool, fd: int, off: int, userdata: Any = None) -> "Ioring":
        self._thread = self._thread or threading.get_ident()
        assert self._thread == threading.get_ident(), "prepare is not thread-safe"
        if read != self._for_read:
            raise OSError(errno.EINVAL, "another direction")
        if fd not in self._fake.registered:
            raise OSError(errno.EBADF, "not registered")
        if len(self._prepared) + len(self._submitted) + self._lost >= self._entries:
            raise OSError(errno.EAGAIN, "the ring is full")
        iov.userdata = userdata
        self._prepared.append((iov, os.dup(fd), off))
        return self

    def submit(self) -> "Ioring":
        self._submitted.extend(self._prepared)
        self._prepared.clear()
        return self

    def wait(self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | None = None) -> list[Part]:
        assert timeout is not None, "one lost completion would hang the thread"
        fake = self._fake
        with fake.changed:
            fake.changed.wait_for(lambda: not fake.held, timeout.total_seconds())
            if fake.held:
                return []
        ended: list[Part] = []
        while self._submitted and len(ended) < max_results:
            part, fd, offset = self._submitted.popleft()
            if fake.lost:
                fake.lost -= 1
                self._lost += 1
                continue
            part.result = self._run(part, fd, offset)
            os.close(fd)
            ended.append(part)
        if len(ended) < min_results:
            threading.Event().wait(timeout.total_seconds())
        return ended

    def _run(self, part: Part, fd: int, offset: int) -> int:
        fake = self._fake
        if fake.failing:
            fake.failing -= 1
            return -errno.EIO
        buf = part.buf
        if fake.short:
            fake.short -= 1
            buf = buf[: len(buf) // 2]
        if self._for_read:
            if self._forbid_holes and any(start <= offset < end for start, end in fake.punched):
                return -errno.ENODATA
            return os.preadv(fd, [buf], offset)
        if fake.torn:
            fake.torn -= 1
            os.pwritev(fd, [buf[: len(buf) // 2]], offset)
            return len(buf)
        return os.pwritev(fd, [buf], offset)
