"""Who writes: an identity that one process holds at a time, and that another takes over when its process is dead.

An identity is a u32 that names slabs and journals. Each holder has an epoch of its own, and claims it by creating the
epoch's journal, which only one process can. The lease file says which slabs belong to the identity, and who holds it.
"""

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.journal import JournalName, JournalWriter

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
        except (OSError, ValueError, TypeError):
            return None
        return holder if all(isinstance(number, int) and 0 <= number < 1 << 32 for number in numbers) else None


class Writer:
    """An identity, held by this process. Not thread-safe, but for `held`."""

    def __init__(
        self, path: Path, file: int, holder: Holder, journal: JournalWriter, lease_s: float, clock: Callable[[], float]
    ) -> None:
        """Use `claim`."""
        self.id = holder.writer
        self.epoch = holder.epoch
        self.journal = journal
        self._path = path
        self._file = file
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
            if Holder.read(self._path) != self._holder:
                self._lost = True
                return
            os.utime(self._file)
            self._beaten = now
        except OSError:
            # The disk may be back in time. If not, others take us for dead, and so must we.
            self._lost |= now - self._beaten >= self._lease_s

    def release(self) -> None:
        """Let others take over at once. Idempotent."""
        self.journal.close()
        if self._file >= 0:
            if not self._lost:
                with suppress(OSError):
                    os.utime(self._file, (0, 0))
            os.close(self._file)
            self._file = -1


class Claims:
    """How identities of one namespace are claimed."""

    def __init__(
        self,
        writers: Path,
        journals: Sequence[Path],
        namespace: bytes,
        geometry: Geometry,
        *,
        lease_s: float,
        shared: bool,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`shared`: the root is on a network file system, where a free lock proves nothing but silence does."""
        self._writers = writers
        self._journals = journals
        self._namespace = namespace
        self._geometry = geometry
        self._lease_s = lease_s
        self._shared = shared
        self._clock = clock

    def claim(self) -> Writer:
        """The identity of a dead writer whose slabs are cut as ours, else a new one.

        Raises:
            OSError: the directory cannot be written.
        """
        return self.adopt() or self._new()

    def adopt(self) -> Writer | None:
        """The identity of a dead writer whose slabs are cut as ours."""
        for path in sorted(self._writers.glob("*.lease")):
            holder = Holder.read(path)
            if holder and Geometry(holder.slot_bytes, holder.slab_slots) == self._geometry:
                writer = self._take(path, holder)
                if writer:
                    return writer
        return None

    def _take(self, path: Path, holder: Holder) -> Writer | None:
        file = self._locked(path, os.O_RDWR)
        if file is None:
            return None
        try:
            # Of those who see the same silence, one creates the journal of the next epoch.
            if not (self._shared and not self._silent(file)) and Holder.read(path) == holder:
                return self._begin(path, file, holder.writer, self._last_epoch(holder) + 1)
        except FileExistsError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        return None

    def _new(self) -> Writer:
        for _ in range(_NEW_TRIES):
            writer = secrets.randbits(32)
            path = self._writers / f"{writer:08x}.lease"
            try:
                file = self._locked(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            if file is not None:
                return self._begin(path, file, writer, 1)
        raise FileExistsError(errno.EEXIST, f"no free writer identity in {_NEW_TRIES} tries", str(self._writers))

    def _begin(self, path: Path, file: int, writer: int, epoch: int) -> Writer:
        journal = JournalWriter(self._journals, writer, epoch, self._namespace)
        geometry = self._geometry
        token, host = secrets.token_hex(16), os.uname().nodename
        holder = Holder(writer, epoch, geometry.slot_bytes, geometry.slab_slots, token, host, os.getpid())
        # In one write of less than a block, padded to a fixed length: a reader sees the old lease or the new one.
        os.pwrite(file, json.dumps(asdict(holder)).encode().ljust(MAX_LEASE_BYTES // 8), 0)
        return Writer(path, file, holder, journal, self._lease_s, self._clock)

    def _last_epoch(self, holder: Holder) -> int:
        names = [JournalName.parse(name) for directory in self._journals for name in os.listdir(directory)]
        return max([holder.epoch, *(name.epoch for name in names if name and name.writer == holder.writer)])

    def _silent(self, file: int) -> bool:
        """Whether the lease has not been touched for `lease_s`, by the file system's clock."""
        probe = self._writers / f".now-{secrets.token_hex(8)}"
        probe.touch(0o600)
        try:
            return probe.stat().st_mtime - os.fstat(file).st_mtime >= self._lease_s
        finally:
            probe.unlink(missing_ok=True)

    def _locked(self, path: Path, flags: int) -> int | None:
        """The file, open and locked; None where another process has it locked, or it is gone."""
        try:
            file = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A shared file system may have no locks; leases do without.
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK) or not self._shared:
                os.close(file)
                if isinstance(error, BlockingIOError):
                    return None
                raise
        return file
