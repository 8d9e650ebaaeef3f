"""One root of a stripe set: a thread for its reads, one for its writes, and what is known of its health.

A disk that hangs holds its own two threads and nobody else's. Each thread works in the order it was asked, so a late
write can never fall on a newer one of the same slot.
"""

import logging
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic

from deepinfer_kvstore.backend import Backend

Job = Callable[[], None]
PROBE_SECONDS = 1.0
"""How long a root that failed or is slow rests before it is tried again."""
MAX_QUEUED_BYTES = 64 << 20
"""Memory that writes which wait for one root may hold; it goes without the writes beyond."""
_LATEST = 0.25  # weight of the latest read in the running mean

_log = logging.getLogger(__name__)


class Lane:
    """A root. Thread-safe."""

    def __init__(self, name: str, backend: Backend | None) -> None:
        """`backend` is None where the root is lost."""
        self.name = name
        self.backend = backend
        self.errors = 0
        """Calls that failed, since the start."""
        self.read_seconds = 0.0
        """Running mean of the time from asking for a read to its end."""
        self._failed_at: dict[bool, float] = {}  # by whether writing, while it fails
        self._named = False
        self._under_way: dict[int, float] = {}  # when each of its reads was asked for, the oldest first
        self._tokens = count()
        self._asked_at = 0.0
        self._queued_bytes = 0
        self._threads = {write: _Worker(f"{'writes' if write else 'reads'} {name}") for write in (False, True)}
        self._lock = Lock()

    @property
    def degraded(self) -> bool:
        """Lost, or its last read or its last write failed."""
        return self.backend is None or bool(self._failed_at)

    def usable(self, *, write: bool) -> bool:
        """Whether to ask it: it is there, and is not known to fail or has not been tried for a while."""
        if self.backend is None:
            return False
        failed_at = self._failed_at.get(write)
        return failed_at is None or monotonic() > failed_at + PROBE_SECONDS

    def is_slow(self, limit_seconds: float) -> bool:
        """Whether a read of it takes longer than that: as a rule, or right now."""
        if self.read_seconds > limit_seconds:
            return True
        with self._lock:
            oldest = next(iter(self._under_way.values()), None)
        return oldest is not None and monotonic() - oldest > limit_seconds

    def has_rested(self) -> bool:
        """Whether it has no read under way and was not asked for one lately."""
        return not self._under_way and monotonic() - self._asked_at > PROBE_SECONDS

    def begin_read(self) -> int:
        """A read is asked for now. Its number, for `end_read`."""
        with self._lock:
            token = next(self._tokens)
            self._under_way[token] = self._asked_at = monotonic()
            return token

    def end_read(self, token: int, *, in_time: bool) -> None:
        """The read is over; `in_time`: just now, so that it says how long reads take."""
        with self._lock:
            taken = monotonic() - self._under_way.pop(token)
            if in_time:
                self.read_seconds += (taken - self.read_seconds) * (_LATEST if self.read_seconds else 1.0)

    def do(self, job: Job, *, write: bool) -> None:
        """Do `job` on one of the two threads, after what was given to it before."""
        self._threads[write].do(job)

    def write(self, job: Job, size: int) -> bool:
        """Do `job`, which holds `size` bytes of memory; False, and never, if too much waits already."""
        with self._lock:
            if self._queued_bytes + size > MAX_QUEUED_BYTES:
                return False
            self._queued_bytes += size

        def counted() -> None:
            job()
            with self._lock:
                self._queued_bytes -= size

        self.do(counted, write=True)
        return True

    def worked(self, *, write: bool) -> None:
        """A read, or a write, succeeded."""
        self._failed_at.pop(write, None)

    def failed(self, error: OSError, *, write: bool) -> None:
        """A read, or a write, failed. The first time, the root is named in the log."""
        with self._lock:
            self.errors += 1
            self._failed_at[write] = monotonic()
            named, self._named = self._named, True
        if not named:
            _log.warning(
                "%s cannot be %s (%s), the other roots serve: where it is lost, run deepinfer kvstore rebuild",
                self.name,
                "written" if write else "read",
                error,
            )

    def close(self) -> None:
        """Let the threads end after what they were given. Does not wait: a disk may hang."""
        reads, writes = self._threads[False], self._threads[True]
        writes.do(reads.end)  # what is to be written may have something done on the other thread at last
        writes.end()


class _Worker:
    """A thread that starts with its first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._started = False
        self._lock = Lock()

    def do(self, job: Job | None) -> None:
        self._jobs.put(job)
        with self._lock:
            started, self._started = self._started, True
        if not started:
            Thread(target=self._work, name=self._name, daemon=True).start()

    def end(self) -> None:
        self.do(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
