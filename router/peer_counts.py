"""The counts of another worker of this host: the form of its file, read as it changes."""

import fcntl
import mmap
import os
import struct
from pathlib import Path
from zlib import crc32

from deepinfer_router.seconds import A_SECOND
from deepinfer_router.target import Load

MAGIC = b"DIRC0001"
HEADER = struct.Struct("<8sQII")
"""Magic, number of the writing, checksum and bytes of the records."""
RECORD = struct.Struct("<Q8q")
"""Key of a target; its sender's `Load`, seconds in units of `countable`; strangers' requests and KV tokens, capacity in
KV tokens or -1, shared KV tokens."""
MOST_TARGETS = 4096
SIZE = HEADER.size + MOST_TARGETS * RECORD.size


class Sums:
    """The counts of all other workers together, by key of the target."""

    def __init__(self) -> None:
        self._sums: dict[int, list[int]] = {}
        self.touched: set[int] = set()
        """Keys whose sums have changed; whoever has seen them clears it."""

    def add(self, key: int, load: tuple[int, ...], sign: int) -> None:
        """One target of one worker, in the units of records; `sign` -1: takes it off again."""
        total = [old + sign * new for old, new in zip(self._sums.get(key, (0, 0, 0, 0)), load, strict=True)]
        if any(total):
            self._sums[key] = total
        else:
            self._sums.pop(key, None)
        self.touched.add(key)

    def load(self, key: int) -> Load:
        """What they have there."""
        active, kv_tokens, units, held_tokens = self._sums.get(key, (0, 0, 0, 0))
        return Load(active, kv_tokens, units / A_SECOND, held_tokens)


class PeerCounts:
    """Another worker's file. OSError: it is gone already, or none of ours."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        try:
            self._map = mmap.mmap(self._file, SIZE, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise OSError(f"{path}: {error}") from error
        self.polled: dict[int, tuple[int, ...]] = {}
        """By key, what it says of polls: the last four numbers of records."""
        self._header = b""
        self._records = b""

    def is_dead(self) -> bool:
        """Whether nobody holds its lock any more."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def remove(self) -> None:
        """It is dead, and its file is of no use."""
        self._path.unlink(missing_ok=True)

    def read(self, sums: Sums) -> None:
        """Brings `sums` up to date. What is being written just now waits for the next time."""
        header = self._map[: HEADER.size]
        if header == self._header:
            return
        magic, _, checksum, length = HEADER.unpack(header)
        records = self._map[HEADER.size : HEADER.size + length]
        if magic != MAGIC or len(records) % RECORD.size or crc32(records) != checksum:
            return
        self._header = header
        self._replace(records, sums)

    def leave(self, sums: Sums) -> None:
        """Takes its counts off `sums`, and reads it no more."""
        self._replace(b"", sums)
        self._map.close()
        os.close(self._file)

    def _replace(self, records: bytes, sums: Sums) -> None:
        size = RECORD.size
        before = self._records
        for at in range(0, max(len(before), len(records)), size):
            old, new = before[at : at + size], records[at : at + size]
            if old != new:
                if old:
                    key, *counts = RECORD.unpack(old)
                    sums.add(key, tuple(counts[:4]), -1)
                    self.polled.pop(key, None)
                if new:
                    key, *counts = RECORD.unpack(new)
                    sums.add(key, tuple(counts[:4]), 1)
                    self.polled[key] = tuple(counts[4:])
        self._records = records
