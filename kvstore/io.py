"""Threads that move bytes: loads first, stores on at most half of the threads, each job with a deadline."""

import logging
from collections import deque
from collections.abc import Sequence
from math import inf
from mmap import mmap
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Protocol

_LONGEST_WAIT_S = 3600.0
_log = logging.getLogger(__name__)


class Job(Protocol):
    """One read or write call with all that belongs to it. Raises nothing."""

    deadline: float
    """In seconds of `time.monotonic()`."""
    is_store: bool

    def run(self, bounce: memoryview) -> None:
        """Do it. `bounce` is page-aligned memory of the thread."""

    def expire(self) -> None:
        """Instead of `run`: its deadline passed, or the store closed, before it began."""

    def overran(self) -> None:
        """Its deadline passed while it ran, as it still does."""


class IoThreads:
    """Runs jobs. Thread-safe.

    A thread stuck in the kernel cannot be taken back, and its job stays unsettled; jobs behind it that no other thread
    takes expire at their deadlines.
    """

    def __init__(self, threads: int, bounce_bytes: int) -> None:
        self._bounce_bytes = bounce_bytes
        self._store_limit = max(1, threads // 2)
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._running: dict[Job, bool] = {}  # whether it was told that it overran
        self._storing = 0
        self._closed = False
        self._alarm_at = inf
        self._lock = Lock()
        self._ready = Condition(self._lock)
        """A worker may find a job."""
        self._idle = Condition(self._lock)
        """Nothing runs."""
        self._alarm = Condition(self._lock)
        """A deadline is earlier than the one that the watchdog waits for."""
        self._threads = [
            Thread(target=self._work, name=f"kvstore-io-{number}", daemon=True) for number in range(threads)
        ]
        self._watchdog = Thread(target=self._watch, name="kvstore-io-watchdog", daemon=True)
        for thread in (*self._threads, self._watchdog):
            thread.start()

    def submit(self, job: Job) -> None:
        """Run `job` on a thread, or expire it."""
        with self._lock:
            if not self._closed:
                (self._stores if job.is_store else self._loads).append(job)
                self._ready.notify()
                if job.deadline < self._alarm_at:
                    self._alarm.notify()
                return
        job.expire()

    def submit_loads(self, jobs: Sequence[Job]) -> None:
        """`submit` for many that read."""
        with self._lock:
            if not self._closed:
                self._loads += jobs
                self._ready.notify(len(jobs))
                if any(job.deadline < self._alarm_at for job in jobs):
                    self._alarm.notify()
                return
        for job in jobs:
            job.expire()

    def waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        with self._lock:
            return len(self._loads) + len(self._stores)

    def active(self) -> int:
        """Jobs that wait or run."""
        with self._lock:
            return len(self._loads) + len(self._stores) + len(self._running)

    def close(self, seconds: float) -> bool:
        """Expire what waits and wait for what runs, at most `seconds`; whether nothing runs any more."""
        with self._lock:
            self._closed = True
            left = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._ready.notify_all()
            self._alarm.notify()
        for job in left:
            job.expire()
        with self._lock:
            return self._idle.wait_for(lambda: not self._running, seconds)

    def _next(self) -> Job | None:
        if self._loads:
            return self._loads.popleft()
        if self._stores and self._storing < self._store_limit:
            self._storing += 1
            return self._stores.popleft()
        return None

    def _work(self) -> None:
        bounce = memoryview(mmap(-1, self._bounce_bytes))
        while True:
            with self._lock:
                while (job := self._next()) is None:
                    if self._closed:
                        return
                    self._ready.wait()
                self._running[job] = False
            try:
                if monotonic() > job.deadline:
                    job.expire()
                else:
                    job.run(bounce)
            except Exception:
                _log.exception("kv store: a transfer ended in an error of the program; it stays overdue")
            finally:
                with self._lock:
                    del self._running[job]
                    self._storing -= job.is_store
                    if self._stores:
                        self._ready.notify()
                    if not self._running:
                        self._idle.notify_all()

    def _watch(self) -> None:
        while True:
            with self._lock:
                deadlines = [job.deadline for job in (*self._loads, *self._stores)]
                deadlines += [job.deadline for job, told in self._running.items() if not told]
                if self._closed and not deadlines:
                    return
                self._alarm_at = min(deadlines, default=inf)
                # A deadline may be infinite, which wait() does not take.
                self._alarm.wait(min(max(0.0, self._alarm_at - monotonic()), _LONGEST_WAIT_S) if deadlines else None)
                now = monotonic()
                late = self._take_late(self._loads, now) + self._take_late(self._stores, now)
                overran = [job for job, told in self._running.items() if not told and job.deadline < now]
                self._running.update(dict.fromkeys(overran, True))
            for job in late:
                job.expire()
            for job in overran:
                job.overran()

    @staticmethod
    def _take_late(queue: deque[Job], now: float) -> list[Job]:
        late = [job for job in queue if job.deadline < now]
        if late:
            kept = [job for job in queue if job.deadline >= now]
            queue.clear()
            queue.extend(kept)
        return late
