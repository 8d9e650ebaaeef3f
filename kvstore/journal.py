"""Append-only journals on the shared directory: what was stored, deleted and touched. They are the truth.

A file has one writer and is named by its identity and epoch. It is a header, then records at multiples of their size,
so that a reader finds the next record behind a torn or damaged one. Several directories hold replicas.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from deepinfer_kvstore.record import RECORD_BYTES, JournalName, Record, pack_header


class JournalWriter:
    """The end of one journal. Thread-safe.

    Replicas that fail are left behind while one of them takes the records; a record keeps its place in all of them.
    """

    def __init__(
        self, directories: Sequence[Path], writer: int, epoch: int, namespace: bytes, *, part: int = 0
    ) -> None:
        """Create the journal of `writer` (u32) in `epoch` (u32), in the namespace of digest `namespace` (32 bytes).

        Raises:
            FileExistsError: that epoch of the writer has a journal already.
            OSError: no directory takes the file.
        """
        self.directories = list(directories)
        self.namespace = namespace
        self.name = JournalName(writer, epoch, part)
        self.records = 0
        """Records in the file that is written now."""
        self._files: list[int] = []
        self._lock = Lock()
        self._begin(self.name)

    def append(self, records: Sequence[Record]) -> int:
        """Append `records` in one write; how many of them the journal now holds, all but after a failure.

        Raises:
            OSError: it holds none of them.
        """
        data = b"".join(record.pack() for record in records)
        failure: OSError | None = None
        kept = 0
        with self._lock:
            # At its own offset, not O_APPEND: what a failed write has torn is then overwritten by the next one.
            offset = (1 + self.records) * RECORD_BYTES
            for file in self._files:
                try:
                    written = _write_all(file, data, offset)
                except OSError as error:
                    failure = error
                else:
                    kept = max(kept, written // RECORD_BYTES)
            self.records += kept
        if not kept and records:
            raise failure or OSError(f"journal {self.name} is closed")
        return kept

    def rotate(self) -> None:
        """Go on in a new file: the part that follows.

        Raises:
            OSError: no directory takes it. The journal goes on in its old file.
        """
        with self._lock:
            before = self._files
            self._begin(self.name._replace(part=self.name.part + 1))
            _close(before)

    def sync(self) -> None:
        """Return once the records survive a power loss, in the replicas that can say so."""
        with self._lock:
            for file in self._files:
                os.fdatasync(file)

    def close(self) -> None:
        """Idempotent. A file without records is removed: it would be looked at for ever."""
        with self._lock:
            _close(self._files)
            if self._files and not self.records:
                for directory in self.directories:
                    with suppress(OSError):
                        (directory / str(self.name)).unlink()
            self._files = []

    def _begin(self, name: JournalName) -> None:
        header = pack_header(self.namespace, name)
        created: dict[Path, int] = {}
        whole = 0
        failure: OSError | None = None
        for directory in self.directories:
            path = directory / str(name)
            try:
                created[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                _write_all(created[path], header, 0)
                whole += 1
            except OSError as error:
                failure = error
                if isinstance(error, FileExistsError):
                    whole = 0
                    break
        if failure and not whole:
            for path, file in created.items():
                os.close(file)
                path.unlink(missing_ok=True)
            raise failure
        self.name, self.records, self._files = name, 0, list(created.values())


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _write_all(file: int, data: bytes, offset: int) -> int:
    """Bytes written of `data`: fewer only after a failure; raises OSError where not one record was."""
    view = memoryview(data)
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(file, view[done:], offset + done)
        except OSError:
            if done < RECORD_BYTES:
                raise
            break
    return done
