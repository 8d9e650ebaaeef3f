"""Keeping journals short: what closed files still say is said again in the writer's open one, and they are removed.

Records may be read twice and in any order, so tailers need not be told: one in the middle of a closed file reads on in
it, or meets the same records again in the open one. A writer compacts its own journals. Those of a dead writer whose
slabs are all gone, or that nobody will go on with, are the GC leader's.
"""

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal import RECORD_BYTES, JournalName, JournalWriter, is_journal, scan

MIN_RECORDS = 1 << 16
"""Journals of fewer records than this in all (6 MiB) are left alone."""
MAX_FILES = 16


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

    def __init__(self, journal: JournalWriter, index: Index) -> None:
        """`index` is of the same namespace. It need not be up to date: it only tells what need not be said again."""
        self._journal = journal
        self._index = index
        self._kept = 0

    def worthwhile(self) -> bool:
        """Whether the writer's journals have doubled since they were last compacted, or lie in many files."""
        closed = self._closed(())
        records = self._journal.records + sum(closed.values()) // RECORD_BYTES
        return records >= MIN_RECORDS + 2 * self._kept or len(closed) >= MAX_FILES

    def compact(self, dead: Collection[int] = ()) -> Compacted:
        """Compact the writer's journals, and with them those of the `dead` writers.

        Raises:
            OSError: a journal cannot be read, or ours not be written. No file is removed then.
        """
        journal = self._journal
        if journal.records:
            journal.rotate()
        closed = self._closed(dead)
        read = kept = 0
        for name in closed:
            for records in scan(journal.directories, name):
                left = self._index.condense(records)
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
