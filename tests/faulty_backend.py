"""A back end whose calls fail, wait or end the process when a test says so."""

from collections.abc import Callable
from typing import TypeVar

from deepinfer_kvstore.backend import Backend, Buffers, Slab

T = TypeVar("T")
Fault = Callable[[str, str, int], None]
"""Called at each call with its name, the slab's and the first slot (0 where there is none): raises, waits or kills."""


def no_fault(call: str, slab: str, slot: int) -> None:
    """All is well."""


class FaultyBackend:
    """Passes calls on to `inner` after `before`, and through `after` when they have returned."""

    def __init__(self, inner: Backend, before: Fault = no_fault, after: Fault = no_fault) -> None:
        self.inner = inner
        self.before = before
        self.after = after
        self.calls: list[tuple[str, str, int]] = []

    def create(self, name: str, slot_bytes: int, slots: int) -> Slab:
        return FaultySlab(self, self._around("create", name, lambda: self.inner.create(name, slot_bytes, slots)))

    def open(self, name: str, *, write: bool) -> Slab:
        return FaultySlab(self, self._around("open", name, lambda: self.inner.open(name, write=write)))

    def names(self) -> list[str]:
        return self._around("names", "", self.inner.names)

    def remove(self, name: str) -> None:
        self._around("remove", name, lambda: self.inner.remove(name))

    def free_bytes(self) -> int:
        return self._around("free_bytes", "", self.inner.free_bytes)

    def close(self) -> None:
        self.inner.close()

    def _around(self, call: str, slab: str, act: Callable[[], T], slot: int = 0) -> T:
        self.calls.append((call, slab, slot))
        self.before(call, slab, slot)
        result = act()
        self.after(call, slab, slot)
        return result


class FaultySlab:
    """A slab of a `FaultyBackend`."""

    def __init__(self, backend: FaultyBackend, inner: Slab) -> None:
        self._backend = backend
        self._inner = inner
        self.name = inner.name
        self.slot_bytes = inner.slot_bytes
        self.slots = inner.slots

    def readv(self, first_slot: int, buffers: Buffers) -> None:
        self._around("readv", lambda: self._inner.readv(first_slot, buffers), first_slot)

    def writev(self, first_slot: int, buffers: Buffers) -> None:
        self._around("writev", lambda: self._inner.writev(first_slot, buffers), first_slot)

    def punch(self, first_slot: int, slots: int) -> None:
        self._around("punch", lambda: self._inner.punch(first_slot, slots), first_slot)

    def sync(self) -> None:
        self._around("sync", self._inner.sync)

    def close(self) -> None:
        self._inner.close()

    def _around(self, call: str, act: Callable[[], None], slot: int = 0) -> None:
        self._backend._around(call, self.name, act, slot)
