"""Who writes: an identity that one process holds at a time, and that another takes over when its process is dead.

An identity is a u32 that names slabs and journals. Each holder has an epoch of its own, and claims it by creating the
epoch's journal, which only one process can. The lease file says which slabs belong to the identity, and who holds it.
"""

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.record import JournalName

MAX_LEASE_BYTES = 4096
_NEW_TRIES = 100


@dataclass(frozen=True)
class Holder:
    """What a lease file says."""

    writer: int
    epoch: int
    slot_bytes: int
    slab_slots: int
    token: str
    """Of this holder alone."""
    host: str
    pid: int

    @classmethod
    def read(cls, path: Path) -> "Holder | None":
        """None: no lease, or not one."""
        try:
            with path.open("rb") as file:
                found: dict[str, Any] = json.loads(file.read(MAX_LEASE_BYTES))
            holder = cls(**found)
            numbers = (holder.writer, holder.epoch, holder.slot_bytes, holder.slab_slots)
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return holder if all(isinstance(number, int) and 0 <= number < 1 << 32 for number in numbers) else None


class Lease:
    """The replicas of one lease, open and locked, in the directories where that was possible."""

    def __init__(self, files: dict[Path, int]) -> None:
        self._files = files

    def names_other(self, holder: Holder) -> bool:
        """Whether a replica names another holder.

        Raises:
            OSError: none can be read.
        """
        found = [Holder.read(path) for path in self._files]
        if not any(found):
            raise OSError(errno.EIO, "the lease cannot be read", str(next(iter(self._files), "")))
        return any(each and each != holder for each in found)

    def write(self, holder: Holder) -> None:
        """Name the holder. Raises OSError where no replica takes it."""
        # In one write of less than a block, padded to a fixed length: a reader sees the old lease or the new one.
        packed = json.dumps(asdict(holder)).encode().ljust(MAX_LEASE_BYTES // 8)
        _some(self._files.values(), lambda file: os.pwrite(file, packed, 0))

    def touch(self, seconds: float | None = None) -> None:
        """Set the time stamp: to now, or to so many seconds after 1970. Raises OSError where no replica can."""
        _some(self._files.values(), lambda file: os.utime(file, seconds if seconds is None else (seconds, seconds)))

    def silent(self, lease_s: float) -> bool:
        """Whether no replica has been touched for `lease_s`, each by its file system's clock.

        Raises:
            OSError: no replica can say.
        """
        told: list[bool] = []
        failure = OSError(errno.EIO, "the lease is empty")
        for path, file in self._files.items():
            try:
                if Holder.read(path):
                    told.append(_silence(path, file) >= lease_s)
            except OSError as error:
                failure = error
        if not told:
            raise failure
        return all(told)

    def close(self) -> None:
        """Idempotent."""
        for file in self._files.values():
            os.close(file)
        self._files = {}


class Writer:
    """An identity, held by this process. Not thread-safe, but for `held`."""

    def __init__(
        self, lease: Lease, holder: Holder, journal: JournalWriter, lease_s: float, clock: Callable[[], float]
    ) -> None:
        """Use `claim`."""
        self.id = holder.writer
        self.epoch = holder.epoch
        self.slab_slots = holder.slab_slots
        self.journal = journal
        self._lease = lease
        self._holder = holder
        self._lease_s = lease_s
        self._clock = clock
        self._beaten = clock()
        self._lost = False

    def held(self) -> bool:
        """Whether the identity is still ours; asked before each write.

        Costs a look at the lease file only where this process slept for long: then another may have taken over.
        """
        if not self._lost and self._clock() - self._beaten >= self._lease_s / 2:
            self.beat()
        return not self._lost

    def beat(self) -> None:
        """Show that this process lives; to be called several times a `lease_s`."""
        now = self._clock()
        try:
            if self._lease.names_other(self._holder):
                self._lost = True
                return
            self._lease.touch()
            self._beaten = now
        except OSError:
            # The disk may be back in time. If not, others take us for dead, and so must we.
            self._lost |= now - self._beaten >= self._lease_s

    def release(self) -> None:
        """Let others take over at once. Idempotent."""
        self.journal.close()
        if not self._lost:
            with suppress(OSError):
                self._lease.touch(0.0)
        self._lease.close()


class Claims:
    """How identities of one namespace are claimed."""

    def __init__(
        self,
        writers: Sequence[Path],
        journals: Sequence[Path],
        namespace: bytes,
        geometry: Geometry,
        *,
        lease_s: float,
        shared: bool,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            writers: Directories of leases, replicas of each other, of which some may fail.
            shared: The root is on a network file system, where a free lock proves nothing but silence does.
        """
        self._writers = writers
        self._journals = journals
        self._namespace = namespace
        self._geometry = geometry
        self.lease_s = lease_s
        self._shared = shared
        self._clock = clock

    def claim(self) -> Writer:
        """The identity of a dead writer whose slabs are cut as ours, else a new one.

        Raises:
            OSError: no directory can be written.
        """
        return self.adopt() or self._new()

    def adopt(self, only: int | None = None, *, of_any_length: bool = False) -> Writer | None:
        """The identity of a dead writer whose slabs are cut as ours; or `of_any_length`, if only slots must agree.
        `only` that one, where it is given.

        Raises:
            OSError: no directory can be written.
        """
        for name in sorted({name for name in _names(self._writers) if name.endswith(".lease")}):
            holder = self._holder(name)
            if holder is None or holder.slot_bytes != self._geometry.slot_bytes or only not in (None, holder.writer):
                continue
            if of_any_length or holder.slab_slots == self._geometry.slab_slots:
                writer = self._take(name, holder)
                if writer:
                    return writer
        return None

    def lacks(self, writer: int) -> bool:
        """Whether an identity has no lease that can be read: somebody has removed or damaged it."""
        return self._holder(_lease_name(writer)) is None

    def restore(self, writer: int, epoch: int) -> bool:
        """Write the lease of an identity that lacks it anew, as one that was released: it can be adopted then. Whether
        that was done: not where a process still holds the damaged file.

        To be called when it has been lacking for `lease_s`: who had it has noticed by then, and goes on as another.
        `epoch` is the last one that is known of.

        Raises:
            OSError: no directory can be written.
        """
        lease = self._locked(_lease_name(writer), os.O_RDWR | os.O_CREAT)
        if lease is None:
            return False
        try:
            lacking = self.lacks(writer)
            if lacking:
                slot_bytes, slab_slots = self._geometry.slot_bytes, self._geometry.slab_slots
                lease.write(Holder(writer, epoch, slot_bytes, slab_slots, secrets.token_hex(16), "", 0))
                lease.touch(0.0)
            return lacking
        finally:
            lease.close()

    def _holder(self, name: str) -> Holder | None:
        """The last one: a replica on a root that was away may name one before."""
        found = [holder for directory in self._writers if (holder := Holder.read(directory / name))]
        found = [holder for holder in found if _lease_name(holder.writer) == name]
        return max(found, key=lambda holder: holder.epoch, default=None)

    def _take(self, name: str, holder: Holder) -> Writer | None:
        lease = self._locked(name, os.O_RDWR | os.O_CREAT)
        if lease is None:
            return None
        try:
            # Of those who see the same silence, one creates the journal of the next epoch.
            epoch = self._last_epoch(holder) + 1
            silent = not self._shared or lease.silent(self.lease_s)
            if silent and epoch < 1 << 32 and self._holder(name) == holder:
                return self._begin(lease, holder.writer, epoch, holder.slab_slots)
        except FileExistsError:
            pass
        except BaseException:
            lease.close()
            raise
        lease.close()
        return None

    def _new(self) -> Writer:
        for _ in range(_NEW_TRIES):
            writer = secrets.randbits(32)
            try:
                lease = self._locked(_lease_name(writer), os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            if lease is not None:
                return self._begin(lease, writer, 1, self._geometry.slab_slots)
        raise FileExistsError(errno.EEXIST, f"no free writer identity in {_NEW_TRIES} tries", str(self._writers[0]))

    def _begin(self, lease: Lease, writer: int, epoch: int, slab_slots: int) -> Writer:
        journal = JournalWriter(self._journals, writer, epoch, self._namespace)
        token, host = secrets.token_hex(16), os.uname().nodename
        holder = Holder(writer, epoch, self._geometry.slot_bytes, slab_slots, token, host, os.getpid())
        lease.write(holder)
        return Writer(lease, holder, journal, self.lease_s, self._clock)

    def _last_epoch(self, holder: Holder) -> int:
        names = [JournalName.parse(name) for name in _names(self._journals)]
        return max([holder.epoch, *(name.epoch for name in names if name and name.writer == holder.writer)])

    def _locked(self, name: str, flags: int) -> Lease | None:
        """The replicas of a lease, open and locked; None where another process has one of them locked.

        Raises:
            OSError: none can be opened; with O_EXCL, FileExistsError where one is there.
        """
        files: dict[Path, int] = {}
        failure: OSError | None = None
        try:
            for directory in self._writers:
                try:
                    files[directory / name] = os.open(directory / name, flags | os.O_CLOEXEC, 0o600)
                    self._lock(files[directory / name])
                except (FileExistsError, BlockingIOError):
                    raise
                except OSError as error:
                    failure = error
                    _close_of(files, directory / name)
        except OSError as error:
            for path in list(files):
                _close_of(files, path)
                if flags & os.O_EXCL:
                    path.unlink(missing_ok=True)
            if isinstance(error, BlockingIOError):
                return None
            raise
        if not files:
            raise failure or FileNotFoundError(errno.ENOENT, "no directory of leases", name)
        return Lease(files)

    def _lock(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A shared file system may have no locks; leases do without.
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK) or not self._shared:
                raise


def _lease_name(writer: int) -> str:
    return f"{writer:08x}.lease"


def _names(directories: Sequence[Path]) -> list[str]:
    """Names of what is in the directories that can be read."""
    names: list[str] = []
    for directory in directories:
        with suppress(OSError):
            names += os.listdir(directory)
    return names


def _some(files: Iterable[int], call: Callable[[int], object]) -> None:
    """Do it for all, of which some may fail. Raises OSError where all do."""
    done = False
    failure = OSError(errno.EBADF, "the lease is closed")
    for file in files:
        try:
            call(file)
            done = True
        except OSError as error:
            failure = error
    if not done:
        raise failure


def _silence(path: Path, file: int) -> float:
    probe = path.with_name(f".now-{secrets.token_hex(8)}")
    probe.touch(0o600)
    try:
        return probe.stat().st_mtime - os.fstat(file).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _close_of(files: dict[Path, int], path: Path) -> None:
    if path in files:
        os.close(files.pop(path))
