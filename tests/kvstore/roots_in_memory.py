"""Roots of an erasure-coded store in memory, that can be held up, made to fail, spoilt and lost."""

import errno
from collections.abc import Callable
from threading import Event

from deepinfer_kvstore.backend import Buffers
from deepinfer_kvstore.code import Code
from deepinfer_kvstore.erasure import ErasureBackend
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.memory import MemoryBackend, MemorySlab


class Root(MemoryBackend):
    """One root. Before each call of a slab `gates[what]` is waited for; those in `fails` raise; `calls` were done."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.gates = {"readv": _open_gate(), "writev": _open_gate()}
        self.arrived = {"readv": Event(), "writev": Event()}
        self.fails: set[str] = set()
        self.tried: list[str] = []
        self.calls: list[str] = []

    def create(self, name: str, slot_bytes: int, slots: int) -> "RootSlab":
        if "create" in self.fails:
            raise OSError(errno.EIO, "made to fail", name)
        return RootSlab(self, super().create(name, slot_bytes, slots))

    def open(self, name: str, *, write: bool) -> "RootSlab":
        return RootSlab(self, super().open(name, write=write))

    def hold(self, what: str) -> None:
        """Let nothing through until `self.gates[what].set()`."""
        self.gates[what].clear()
        self.arrived[what].clear()

    def memory(self, name: str) -> memoryview:
        """The bytes of a slab, writable."""
        return super().open(name, write=True)._view


class RootSlab:
    """See `Root`."""

    def __init__(self, root: Root, slab: MemorySlab) -> None:
        self._root, self._slab = root, slab
        self.name, self.slot_bytes, self.slots = slab.name, slab.slot_bytes, slab.slots
        self.closed = False

    def readv(self, first_slot: int, buffers: Buffers) -> None:
        self._call("readv", lambda: self._slab.readv(first_slot, buffers))

    def writev(self, first_slot: int, buffers: Buffers) -> None:
        self._call("writev", lambda: self._slab.writev(first_slot, buffers))

    def punch(self, first_slot: int, slots: int) -> None:
        self._call("punch", lambda: self._slab.punch(first_slot, slots))

    def sync(self) -> None:
        self._call("sync", self._slab.sync)

    def close(self) -> None:
        self.closed = True

    def _call(self, what: str, call: Callable[[], None]) -> None:
        assert not self.closed
        self._root.tried.append(what)
        if what in self._root.gates:
            self._root.arrived[what].set()
            assert self._root.gates[what].wait(30)
        if what in self._root.fails:
            raise OSError(errno.EIO, "made to fail", self.name)
        call()
        self._root.calls.append(what)


def _open_gate() -> Event:
    gate = Event()
    gate.set()
    return gate


def erasure(
    roots: list[Root], geometry: Geometry, code: Code, *, lost: tuple[int, ...] = (), margin: int = 0
) -> ErasureBackend:
    """The back end over `roots`, those numbered in `lost` being gone."""
    named = [(f"root{number}", None if number in lost else root) for number, root in enumerate(roots)]
    return ErasureBackend(named, code, geometry, 77, margin=margin)
