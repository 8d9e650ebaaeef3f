"""Private, page-aligned memory for the shards of one transfer, used again.

Reads that nobody waits for any more end up here and nowhere else: an arena goes back only when the last of its users
has let it go, so it can wait for a hanging disk while the caller's buffers are long in other hands.
"""

from collections.abc import Callable
from mmap import mmap
from threading import Lock

import numpy as np

from deepinfer_kvstore.shards import Rows


class Arena:
    """Rows for the shards of some slots, and a count of who uses them. Thread-safe."""

    def __init__(self, rows: Rows, give_back: Callable[["Arena"], None]) -> None:
        self.rows = rows
        self._address = rows.ctypes.data
        self._give_back = give_back
        self._users = 0
        self._lock = Lock()

    def hold(self, users: int = 1) -> None:
        """Keep it for `users` more; each must let it go."""
        with self._lock:
            self._users += users

    def let_go(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._give_back(self)

    def row(self, index: int) -> memoryview:
        """The memory of one row."""
        return memoryview(self.rows[index].reshape(-1))

    def row_address(self, index: int) -> int:
        """Where in memory a row begins: at a page."""
        return int(self._address + index * self.rows.strides[0])


class Arenas:
    """Arenas of one slot size. Thread-safe."""

    def __init__(self, rows: int, row_slot_bytes: int, keep_bytes: int) -> None:
        """Unused ones of together `keep_bytes` are kept."""
        self._rows = rows
        self._row_slot_bytes = row_slot_bytes
        self._keep_bytes = keep_bytes
        self._kept_bytes = 0
        self._free: dict[int, list[Arena]] = {}
        self._lock = Lock()

    def take(self, slots: int) -> Arena:
        """An arena for runs of `slots` slots, held once. What it holds is undefined."""
        with self._lock:
            free = self._free.get(slots)
            arena = free.pop() if free else None
            if arena:
                self._kept_bytes -= arena.rows.nbytes
        if arena is None:
            memory = mmap(-1, self._rows * slots * self._row_slot_bytes)
            arena = Arena(np.frombuffer(memory, np.uint8).reshape(self._rows, slots, -1), self._take_back)
        arena.hold()
        return arena

    def _take_back(self, arena: Arena) -> None:
        with self._lock:
            if self._kept_bytes + arena.rows.nbytes <= self._keep_bytes:
                self._kept_bytes += arena.rows.nbytes
                self._free.setdefault(arena.rows.shape[1], []).append(arena)
