"""Append-only journals on the shared directory: what was stored, deleted and touched. They are the truth.

A file has one writer and is named by its identity and epoch. It is a header of 96 bytes, then records of 96 bytes at
multiples of 96, so that a reader finds the next record behind a torn or damaged one. Several directories hold replicas.
"""

import os
import re
import struct
from binascii import crc32
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from enum import IntEnum
from errno import ENOENT
from itertools import zip_longest
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import NamedTuple

from deepinfer_kvstore.entry import PACKED_BYTES, Entry, Location
from deepinfer_kvstore.keys import KEY_BYTES, Key

RECORD_BYTES = 96
_RECORD = struct.Struct(f"<B{KEY_BYTES}s{PACKED_BYTES}sI")
_HEADER = struct.Struct("<8sI32s16sII24xI")
_MAGIC = b"DIKVJRNL"
_VERSION = 1
_CRC_BYTES = 4
_NAME = re.compile(r"([0-9a-f]{8})\.([0-9a-f]{8})(?:-([0-9a-f]{4}))?\.log")


class Op(IntEnum):
    """What a record says of the block at its entry's location. Numbers are on disk."""

    PUT = 1
    """It is there, under the record's key."""
    DELETE = 2
    """It is gone for good: the slot's owner may write another into the slot."""
    TOUCH = 3
    """It was used at `touched_ms`. `ttl_class` is 0 unless its user needs it for longer than those before."""


_OPS = {int(op): op for op in Op}


class Record(NamedTuple):
    """One line of a journal."""

    op: Op
    key: Key
    entry: Entry

    @classmethod
    def delete(cls, key: Key, location: Location) -> "Record":
        """That the block of `key` at `location` is gone: nothing but where counts."""
        return cls(Op.DELETE, key, Entry(location, 0, bytes(8), 0, 0, 0, 0, 0))

    @classmethod
    def touch(cls, key: Key, entry: Entry, touched_ms: int, ttl_class: int = 0) -> "Record":
        """That block `entry` was used, by a user of class `ttl_class`."""
        longer = ttl_class if ttl_class > entry.ttl_class else 0
        return cls(Op.TOUCH, key, entry._replace(touched_ms=touched_ms, ttl_class=longer))

    def pack(self) -> bytes:
        """The record as it lies in a journal, `RECORD_BYTES` long."""
        packed = _RECORD.pack(self.op, self.key, self.entry.pack(), 0)
        return packed[:-_CRC_BYTES] + crc32(packed[:-_CRC_BYTES]).to_bytes(_CRC_BYTES, "little")


def unpack_record(packed: bytes | memoryview) -> Record | None:
    """The record that `pack` wrote; None for any other `RECORD_BYTES` bytes."""
    number, key, entry, crc = _RECORD.unpack(packed)
    op = _OPS.get(number)
    return Record(op, key, Entry.unpack(entry)) if op and crc32(packed[:-_CRC_BYTES]) == crc else None


class JournalName(NamedTuple):
    """What the name of a journal file says."""

    writer: int
    epoch: int
    part: int
    """Number of the file among those of one epoch: compaction begins a new one."""

    @classmethod
    def parse(cls, name: str) -> "JournalName | None":
        """None: not the name of a journal."""
        match = _NAME.fullmatch(name)
        return match and cls(int(match[1], 16), int(match[2], 16), int(match[3] or "0", 16))

    def __str__(self) -> str:
        part = f"-{self.part:04x}" if self.part else ""
        return f"{self.writer:08x}.{self.epoch:08x}{part}.log"


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
        packed = _HEADER.pack(_MAGIC, _VERSION, self.namespace, os.urandom(16), name.writer, name.epoch, 0)
        header = packed[:-_CRC_BYTES] + crc32(packed[:-_CRC_BYTES]).to_bytes(_CRC_BYTES, "little")
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


LIST_SECONDS = 5.0
"""The directory is listed this often even if its modification time says that nothing changed."""
RACY_SECONDS = 2.0
"""For so long after a change it is listed every time: file systems have time stamps as coarse as this."""
SUSPECT_SECONDS = 2.0
"""Damage is passed over, and a shorter file believed, only after it looked the same for so long: on network file
systems a write's pages, and a file's size, may reach readers late."""
OPEN_FILES = 256
SCAN_BYTES = 4096 * RECORD_BYTES


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
        shorter = False
        for file in self._opened(name):
            try:
                data = os.pread(file, limit * RECORD_BYTES, offset)
                shorter |= not data and os.fstat(file).st_size < offset
            except OSError:
                continue
            records = _valid_run(data)
            if len(records) > len(best):
                best = records
            if len(data) > len(longest):
                longest = data
        if best or len(longest) < RECORD_BYTES:
            if not best and shorter and self._suspected(name, offset):
                return [], RECORD_BYTES
            return best, offset + len(best) * RECORD_BYTES
        behind = _first_valid(longest)
        if (behind is None and len(longest) < limit * RECORD_BYTES) or not self._suspected(name, offset):
            return [], offset
        return [], offset + (limit if behind is None else behind) * RECORD_BYTES

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
            if found.get(name) != inodes:
                self._close(name)
                self._identities.pop(name, None)
                self._suspects.pop(name, None)
                self.foreign.discard(name)
        self._inodes = found
        for name in found:
            if name not in self._identities and name not in self.foreign:
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
            identity = _identity(packed, self._namespace)
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
            return _identity(file.read(RECORD_BYTES), namespace) is not None
    except OSError:
        return False


def _modified_ns(directory: Path) -> int:
    try:
        return os.stat(directory).st_mtime_ns
    except OSError:
        return -1


def _identity(header: bytes, namespace: bytes) -> bytes | None:
    """16 bytes that tell a journal from others of its name; None where it is no journal of this namespace."""
    if len(header) < RECORD_BYTES:
        return None
    magic, version, found, identity, _, _, crc = _HEADER.unpack(header)
    intact = magic == _MAGIC and version == _VERSION and crc == crc32(header[:-_CRC_BYTES])
    return identity if intact and found == namespace else None


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
