"""Who collects: one process per namespace, by a lease file on the shared directory.

Nothing depends on there being one only: a collection deletes blocks at a location and generation, so two at once delete
the same blocks twice, or a little more than was needed. The lease saves that work, without locks that a network file
system may lack and without comparing the clocks of two machines: a lease is stale when its beat, which only has to
change, has stayed the same for `lease_s` on the observer's own monotonic clock.
"""

import errno
import json
import os
import uuid
from contextlib import suppress
from pathlib import Path
from time import monotonic, time_ns
from typing import NamedTuple

_MAX_BYTES = 256


class _Seen(NamedTuple):
    owner: str
    epoch: int
    beat_ns: int


class GcLease:
    """One process's view of `gc.lease`. Not thread-safe: the collector's thread alone uses it."""

    def __init__(self, directory: Path, lease_s: float) -> None:
        """`directory`: the namespace's; a holder that is silent for `lease_s` seconds has lost it."""
        self.path = directory / "gc.lease"
        self.owner = uuid.uuid4().hex
        self.epoch = 0
        """How many times the lease was taken while its file was there; of the last holding of this process."""
        self._lease_s = lease_s
        self._seen: _Seen | None = None
        self._seen_at = 0.0

    def hold(self) -> bool:
        """Whether this process may collect now: beats if it holds the lease, takes it if it is free or stale.

        Raises:
            OSError: the directory cannot be read or written.
        """
        seen = self._read()
        if seen is not None and seen.owner == self.owner:
            self._beat()
            return True
        if seen is None:
            return self._take(self.epoch + 1)
        if seen != self._seen:
            self._seen, self._seen_at = seen, monotonic()
            return False
        return monotonic() - self._seen_at >= self._lease_s and self._take(seen.epoch + 1)

    def held(self) -> bool:
        """Whether nobody has taken the lease since `hold` said yes. To be asked before each batch of deletions."""
        seen = self._read()
        return seen is not None and seen.owner == self.owner

    def release(self) -> None:
        """Let another process collect at once. No error where the lease is not held."""
        with suppress(OSError):
            if self.held():
                self.path.unlink()

    def _read(self) -> _Seen | None:
        """What the file says; None where there is none. One that cannot be understood is somebody's, epoch 0."""
        try:
            with self.path.open("rb") as file:
                text, beat_ns = file.read(_MAX_BYTES), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None
        try:
            found = json.loads(text)
            return _Seen(str(found["owner"]), int(found["epoch"]), beat_ns)
        except (ValueError, TypeError, KeyError, OverflowError):
            return _Seen("", 0, beat_ns)

    def _beat(self) -> None:
        now = time_ns()
        with suppress(FileNotFoundError):  # taken just now: the next `held` says so
            os.utime(self.path, ns=(now, now))

    def _take(self, epoch: int) -> bool:
        """Put our own file in the lease's place. Of several that do so at once, the last to rename holds it."""
        new = self.path.with_name("gc.lease.new")
        try:
            new.write_text(json.dumps({"owner": self.owner, "epoch": epoch}))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return True  # collecting is what makes room, and that others do it too harms nobody
        with suppress(FileNotFoundError):  # renamed by another that takes the lease now
            new.rename(self.path)
        self.epoch = epoch
        return self.held()
