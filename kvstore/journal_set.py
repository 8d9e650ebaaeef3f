"""Reading journals: following those that are being written, and all that is left of those that are not."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from errno import ENOENT
from itertools import zip_longest
from pathlib import Path
from time import monotonic

from deepinfer_kvstore.record import RECORD_BYTES, JournalName, Record, identity_of, unpack_record

LIST_SECONDS = 5.0
"""The directory is listed this often even if its modification time says that nothing changed."""
RACY_SECONDS = 2.0
"""For so long after a change it is listed every time: file systems have time stamps as coarse as this."""
SUSPECT_SECONDS = 2.0
"""Damage is passed over, and a shorter file believed, only after it looked the same for so long: on network file
systems a write's pages, and a file's size, may reach readers late."""
OPEN_FILES = 256
SCAN_BYTES = 256 * RECORD_BYTES
"""Read at once by `scan`: a millisecond of unpacking."""


class JournalSet:
    """The journals of one namespace, as a reader sees them. Not thread-safe. Never raises for what it finds.

    A look at journals that have nothing new costs one `stat` for the directory and one `pread` for each of them.
    """

    def __init__(self, directories: Sequence[Path], namespace: bytes) -> None:
        """`directories` are replicas of each other; `namespace` is the digest that the journals' headers must have."""
        self.foreign: set[str] = set()
        """Names of files that are no journals of this namespace."""
        self._directories = list(directories)
        self._namespace = namespace
        self._names: list[str] = []
        self._modified: list[int] = []
        self._listed = self._changed = -LIST_SECONDS
        self._inodes: dict[str, list[int]] = {}
        self._files: dict[str, list[int]] = {}
        self._identities: dict[str, bytes] = {}
        self._suspects: dict[str, tuple[int, float]] = {}

    def names(self) -> list[str]:
        """Names of the journals of this namespace, sorted. A new one may show only after `LIST_SECONDS`."""
        now = monotonic()
        modified = [_modified_ns(directory) for directory in self._directories]
        if modified != self._modified:
            self._modified, self._changed = modified, now
        if now - self._changed < RACY_SECONDS or now - self._listed >= LIST_SECONDS:
            self._listed = now
            self._list()
        return self._names

    def identity(self, name: str) -> bytes | None:
        """16 bytes that tell this file from another of its name; None where there is no journal (yet)."""
        return self._identities.get(name)

    def read(self, name: str, offset: int, limit: int) -> tuple[list[Record], int]:
        """Up to `limit` records of a journal, from `offset` (bytes; at least `RECORD_BYTES`, where the first lies).

        Returns the records, and the offset behind them. It is the given one where there is nothing new or the next
        record is torn; larger without records where damage was passed over; `RECORD_BYTES` where the file has become
        shorter than `offset` and has to be read again.
        """
        best: list[Record] = []
        longest = b""
        sizes: list[int] = []
        for file in self._opened(name):
            try:
                data = os.pread(file, limit * RECORD_BYTES, offset)
                if not data:
                    sizes.append(os.fstat(file).st_size)
            except OSError:
                continue
            records = _valid_run(data)
            if len(records) > len(best):
                best = records
            if len(data) > len(longest):
                longest = data
        if best:
            return best, offset + len(best) * RECORD_BYTES
        if len(longest) >= RECORD_BYTES:
            behind = _first_valid(longest)
            if behind is None:
                behind = limit if len(longest) == limit * RECORD_BYTES else 0
            if behind and self._suspected(name, offset):
                return [], offset + behind * RECORD_BYTES
        elif not longest and sizes and max(sizes) < offset:
            if self._suspected(name, offset):
                return [], RECORD_BYTES
        elif self._suspects:
            self._suspects.pop(name, None)
        return [], offset

    def close(self) -> None:
        """Close the files. Idempotent; the set may be used on."""
        for name in list(self._files):
            self._close(name)

    def _list(self) -> None:
        found: dict[str, list[int]] = {}
        listed = 0
        for directory in self._directories:
            try:
                with os.scandir(directory) as entries:
                    for entry in entries:
                        if JournalName.parse(entry.name):
                            found.setdefault(entry.name, []).append(entry.inode())
                listed += 1
            except OSError:  # this replica is out of reach
                continue
        if not listed and self._names:  # all of them are: what was there may be there still
            return
        for name, inodes in list(self._inodes.items()):
            if len(self._files.get(name, inodes)) != len(inodes):  # one could not be opened
                self._close(name)
            if found.get(name) != inodes:
                self._close(name)
                self._identities.pop(name, None)
                self._suspects.pop(name, None)
                self.foreign.discard(name)
        self._inodes = found
        for name in found:
            if name not in self._identities:
                self._identify(name)
        self._names = sorted(self._identities)

    def _identify(self, name: str) -> None:
        for file in self._opened(name):
            try:
                packed = os.pread(file, RECORD_BYTES, 0)
            except OSError:
                continue
            if len(packed) < RECORD_BYTES:  # its writer is just creating it
                continue
            identity = identity_of(packed, self._namespace)
            if identity:
                self._identities[name] = identity
                self.foreign.discard(name)
                return
            self.foreign.add(name)

    def _opened(self, name: str) -> list[int]:
        files = self._files.pop(name, None)
        if files is None:
            if len(self._files) >= OPEN_FILES:
                self._close(next(iter(self._files)))
            files = []
            for directory in self._directories:
                try:
                    files.append(os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC))
                except OSError:
                    continue
        if files:
            self._files[name] = files  # the last is the one used last
        return files

    def _close(self, name: str) -> None:
        for file in self._files.pop(name, []):
            os.close(file)

    def _suspected(self, name: str, offset: int) -> bool:
        """Whether the journal has looked wrong at this offset for long enough."""
        before, since = self._suspects.get(name, (-1, 0.0))
        if before != offset:
            self._suspects[name] = offset, monotonic()
            return False
        return monotonic() - since >= SUSPECT_SECONDS


def scan(directories: Sequence[Path], name: str) -> Iterator[list[Record]]:
    """All that can be read of a journal to which nobody writes any more: what lies behind damage too.

    Raises:
        FileNotFoundError: there is no replica (any more).
        OSError: a replica that is there cannot be read.
    """
    with ExitStack() as opened:
        files = []
        for directory in directories:
            with suppress(FileNotFoundError):
                files.append(opened.enter_context((directory / name).open("rb", buffering=0)))
        if not files:
            raise FileNotFoundError(ENOENT, "journal is gone", name)
        offset = RECORD_BYTES
        while any(replicas := [os.pread(file.fileno(), SCAN_BYTES, offset) for file in files]):
            records = []
            for cell in zip_longest(*map(_pieces, replicas)):
                records += [record for piece in cell if piece and (record := unpack_record(piece))][:1]
            yield records
            offset += SCAN_BYTES


def is_journal(path: Path, namespace: bytes) -> bool:
    """Whether the file is a journal of this namespace."""
    try:
        with path.open("rb", buffering=0) as file:
            return identity_of(file.read(RECORD_BYTES), namespace) is not None
    except OSError:
        return False


def _modified_ns(directory: Path) -> int:
    try:
        return os.stat(directory).st_mtime_ns
    except OSError:
        return -1


def _pieces(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    return (view[at : at + RECORD_BYTES] for at in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES))


def _valid_run(data: bytes) -> list[Record]:
    records: list[Record] = []
    for piece in _pieces(data):
        record = unpack_record(piece)
        if record is None:
            break
        records.append(record)
    return records


def _first_valid(data: bytes) -> int | None:
    return next((number for number, piece in enumerate(_pieces(data)) if unpack_record(piece)), None)
