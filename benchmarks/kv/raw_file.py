"""The bound: one preallocated file and as many threads as the store has, whole runs of blocks by preadv and pwritev."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kv.contender import Request, Rows

RUN_BYTES = 4 << 20
"""Of one system call; larger ones were not faster."""


class RawFile:
    """No names, no checks: block rows one behind the other, where the caller remembers them to be."""

    def __init__(self, path: Path, rows: Rows, *, direct: bool, threads: int) -> None:
        self._path, self._rows = path, rows
        self._flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self._run = max(1, RUN_BYTES // rows.row_bytes)
        self._pool = ThreadPoolExecutor(threads)
        self._file = -1

    def store(self, requests: Sequence[Request]) -> None:
        self._call(os.pwritev, requests, 0)

    def load(self, requests: Sequence[Request]) -> None:
        self._call(os.preadv, requests, self._rows.blocks)

    def renew(self) -> None:
        """Preallocate a new file, as a new slab is, so that every store is a first one."""
        self.close_file()
        self._path.unlink(missing_ok=True)
        self._open()
        os.posix_fallocate(self._file, 0, self._rows.blocks * self._rows.row_bytes)

    def files(self) -> list[Path]:
        return [self._path]

    def close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def close(self) -> None:
        self.close_file()
        self._pool.shutdown()

    def _open(self) -> None:
        if self._file < 0:
            self._file = os.open(self._path, self._flags, 0o600)

    def _call(
        self, move: Callable[[int, list[memoryview], int], int], requests: Sequence[Request], row_offset: int
    ) -> None:
        self._open()
        runs = [
            request.rows[start : start + self._run]
            for request in requests
            for start in range(0, len(request.rows), self._run)
        ]

        def one(run: range) -> bool:
            pieces = [self._rows.row[row + row_offset] for row in run]
            return move(self._file, pieces, run.start * self._rows.row_bytes) == len(run) * self._rows.row_bytes

        if not all(self._pool.map(one, runs)):
            raise RuntimeError("raw file: a call moved fewer bytes than asked for")
