"""The bound: one preallocated file, whole runs of blocks by preadv and pwritev, no names, no checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kv.contender import Request, Rows

RUN_BYTES = 4 << 20
"""Of one system call; larger ones were not faster."""


class RawFile:
    """A file as long as the first half of the rows, preallocated as a slab is. Row after row lies in it.

    Every store writes over the one before: to remove a file between turns would have the file system free blocks during
    the next contender's turn, which one that makes many files waits for.
    """

    def __init__(self, path: Path, rows: Rows, *, direct: bool) -> None:
        self.path, self.rows = path, rows
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self.number = os.open(path, flags, 0o600)
        os.posix_fallocate(self.number, 0, rows.blocks * rows.row_bytes)

    def close(self) -> None:
        """Once."""
        os.close(self.number)


class RawCalls:
    """Stores to and loads from a raw file with so many threads."""

    def __init__(self, file: RawFile, threads: int) -> None:
        self.file = file
        self._rows = file.rows
        self._run = max(1, RUN_BYTES // file.rows.row_bytes)
        self._pool = ThreadPoolExecutor(threads)

    def store(self, requests: Sequence[Request]) -> None:
        self._call(os.pwritev, requests, 0)

    def load(self, requests: Sequence[Request]) -> None:
        self._call(os.preadv, requests, self._rows.blocks)

    def files(self) -> list[Path]:
        return [self.file.path]

    def close(self) -> None:
        self._pool.shutdown()

    def _call(
        self, move: Callable[[int, list[memoryview], int], int], requests: Sequence[Request], row_offset: int
    ) -> None:
        row_bytes = self._rows.row_bytes
        runs = [
            request.rows[start : start + self._run]
            for request in requests
            for start in range(0, len(request.rows), self._run)
        ]

        def one(run: range) -> bool:
            pieces = [self._rows.row[row + row_offset] for row in run]
            return move(self.file.number, pieces, run.start * row_bytes) == len(run) * row_bytes

        if not all(self._pool.map(one, runs)):
            raise RuntimeError("raw file: a call moved fewer bytes than asked for")
