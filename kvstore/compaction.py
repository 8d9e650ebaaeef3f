"""Keeping journals short: what closed files still say is said again in the writer's open one, and they are removed.

Records may be read twice and in any order, so tailers need not be told: one in the middle of a closed file reads on in
it, or meets the same records again in the open one. A writer compacts its own journals. Those of a dead writer whose
slabs are all gone, or that nobody will go on with, are the GC leader's.
"""

import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from threading import Thread
from time import monotonic

from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.journal_set import is_journal, scan
from deepinfer_kvstore.pace import Pace
from deepinfer_kvstore.record import RECORD_BYTES, JournalName

MIN_RECORDS = 1 << 16
"""Journals of fewer records than this in all (6 MiB) are left alone."""
MAX_FILES = 16
"""A writer may have so many: each costs every reader a system call at every look."""
PAUSE_SECONDS = 60.0
"""Between two looks at whether it is worthwhile."""

SHARE = 0.1
"""Of the time, beside an engine that decodes in the same process."""
_BATCH = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compacted:
    """What one compaction did."""

    files: int
    """Removed."""
    read: int
    """Records in them."""
    kept: int
    """Records said again."""


class Compactor:
    """Compacts the journals of one writer. Not thread-safe; the writer may append meanwhile."""

    def __init__(self, journal: JournalWriter, index: Index, held: Callable[[], bool] = lambda: True) -> None:
        """`index` is of the same namespace. It need not be up to date: it only tells what need not be said again.

        `held` says whether the writer still has its identity, and with it the right to its earlier journals.
        """
        self._journal = journal
        self._index = index
        self._held = held
        self._kept = 0
        self._next = monotonic() + PAUSE_SECONDS
        self._thread: Thread | None = None

    def keep_short(self, dead: Collection[int] = ()) -> None:
        """Compact on a thread of its own when it is worthwhile. To be called as often as one likes; does not wait.

        `dead` are writers whose identities this process has taken over.
        """
        if monotonic() < self._next or (self._thread and self._thread.is_alive()):
            return
        self._next = monotonic() + PAUSE_SECONDS
        if self.worthwhile(dead):
            self._thread = Thread(target=self._compact_or_warn, args=(dead,), name="kvstore-compaction", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the thread of `keep_short`; whether it has ended. Closing the journal makes it end soon."""
        if self._thread:
            self._thread.join(seconds)
        return not (self._thread and self._thread.is_alive())

    def worthwhile(self, dead: Collection[int] = ()) -> bool:
        """Whether the writer's journals have doubled since they were last compacted, or lie in many files."""
        closed = self._closed(dead)
        records = self._journal.records + sum(closed.values()) // RECORD_BYTES
        return records >= MIN_RECORDS + 2 * self._kept or len(closed) >= MAX_FILES

    def compact(self, dead: Collection[int] = (), share: float = 1.0) -> Compacted:
        """Compact the writer's journals, and with them those of the `dead` writers, in a `share` of the time.

        Raises:
            OSError: a journal cannot be read, or ours not be written. No file is removed then.
        """
        pace = Pace(share)
        journal = self._journal
        if journal.records:
            journal.rotate()
        closed = self._closed(dead)
        read = kept = 0
        for name in closed:
            found = pace.over(record for piece in scan(journal.directories, name) for record in piece)
            while records := list(islice(found, _BATCH)):
                left = self._index.condense(records)
                if not self._held():
                    raise OSError(f"journal {journal.name}: another process has the writer's identity")
                if journal.append(left) < len(left):
                    raise OSError(f"journal {journal.name}: cut short while compacting {name}")
                read, kept = read + len(records), kept + len(left)
        journal.sync()
        for name in closed:
            for directory in journal.directories:
                with suppress(OSError):
                    (directory / name).unlink()
        self._kept = kept
        return Compacted(len(closed), read, kept)

    def _compact_or_warn(self, dead: Collection[int]) -> None:
        try:
            done = self.compact(dead, SHARE)
        except OSError as error:
            _log.warning("kv store: journal %s: not compacted: %s", self._journal.name, error)
        else:
            _log.info("kv store: journal %s: %d of %d records kept", self._journal.name, done.kept, done.read)

    def _closed(self, dead: Collection[int]) -> dict[str, int]:
        """Names and sizes of the writer's earlier journals, and of all those of the dead."""
        own = self._journal.name
        found: dict[str, int] = {}
        for directory in self._journal.directories:
            with suppress(OSError), os.scandir(directory) as entries:
                for entry in entries:
                    name = JournalName.parse(entry.name)
                    if not name or (name.writer not in dead and not (name.writer == own.writer and name < own)):
                        continue
                    if is_journal(directory / entry.name, self._journal.namespace):
                        found[entry.name] = max(found.get(entry.name, 0), entry.stat().st_size)
        return found
