"""Who is measured, and on what: requests of blocks in host memory as vLLM's offload stack lays it out."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Request:
    """One request's blocks: block i has the hash `hashes[i]` and lies in row `first_row + i`."""

    hashes: list[bytes]
    first_row: int

    @property
    def rows(self) -> range:
        """Rows that it stores from; it loads into as many rows `Rows.blocks` further on."""
        return range(self.first_row, self.first_row + len(self.hashes))


@dataclass(frozen=True)
class Shape:
    """How much is moved at once."""

    payload_bytes: int
    requests: int
    blocks: int
    """Of each request."""

    @property
    def bytes(self) -> int:
        """Payload of one store or load."""
        return self.payload_bytes * self.requests * self.blocks

    def disk_bytes(self, rounds: int) -> int:
        """Of so many rounds and the one that warms up: three keep every round's blocks, two the last one's."""
        return self.bytes * (3 * (rounds + 1) + 2)


class Rows:
    """Shared memory of two times `blocks` rows, each one block padded to whole pages: vLLM's primary tier.

    The first half holds random bytes, to be stored; the second half is for loading.
    """

    def __init__(self, payload_bytes: int, blocks: int) -> None:
        self.payload_bytes, self.blocks = payload_bytes, blocks
        self.row_bytes = -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES
        memory = mmap.mmap(-1, 2 * blocks * self.row_bytes)  # anonymous and shared, so of whole pages and faulted in
        self.array = np.frombuffer(memory, np.uint8).reshape(2 * blocks, self.row_bytes)
        self.array[:blocks, :payload_bytes] = np.random.default_rng(0).integers(
            0, 256, (blocks, payload_bytes), np.uint8
        )
        self.array[blocks:] = 0
        self.view = memoryview(self.array)
        flat = self.view.cast("B")
        self.row = [flat[i * self.row_bytes : (i + 1) * self.row_bytes] for i in range(2 * blocks)]
        self.payload = [row[:payload_bytes] for row in self.row]

    def clear(self) -> None:
        """Forget what was loaded."""
        self.array[self.blocks :] = 0

    def check(self, who: str) -> None:
        """Raise RuntimeError unless every byte that was stored has been loaded."""
        loaded, stored = (
            self.array[self.blocks :, : self.payload_bytes],
            self.array[: self.blocks, : self.payload_bytes],
        )
        if not np.array_equal(loaded, stored):
            raise RuntimeError(f"{who}: loaded other bytes than were stored, so its time means nothing")


class Contender(Protocol):
    """Stores and loads whole requests at once, all of them in flight together.

    Both calls return when the last block has arrived and raise RuntimeError when one has not.
    """

    def store(self, requests: Sequence[Request]) -> None:
        """Write every block; each is readable afterwards."""

    def load(self, requests: Sequence[Request]) -> None:
        """Read every block into the second half of the rows."""

    def files(self) -> list[Path]:
        """Where the bytes lie."""

    def close(self) -> None:
        """End its threads."""


def drop_page_cache(files: Sequence[Path]) -> None:
    """Write back and forget the pages of these files."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
