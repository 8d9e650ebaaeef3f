"""Open slabs, a bounded number of them. A slab is not closed while a call on it is under way."""

import resource
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from deepinfer_kvstore.backend import Backend, Slab

MAX_OPEN = 256
_FILES = 2  # numbers that a slab takes of each root


def max_open(roots: int) -> int:
    """Slabs over `roots` roots to hold open: with at most half of the file numbers that this process may have."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_OPEN
    return max(1, min(MAX_OPEN, files // 2 // (_FILES * roots)))


def slab_name(writer: int, slab: int) -> str:
    """File name of a slab."""
    return f"{writer:08x}-{slab:08x}.slab"


def parse_slab_name(name: str) -> tuple[int, int] | None:
    """Writer and number of the slab `name`; None: not a slab."""
    writer, slab = name[:8], name[9:17]
    try:
        numbers = int(writer, 16), int(slab, 16)
    except ValueError:
        return None
    return numbers if slab_name(*numbers) == name else None


class _Opened:
    def __init__(self, slab: Slab, *, write: bool) -> None:
        self.slab = slab
        self.write = write
        self.users = 0
        self.forgotten = False


class OpenSlabs:
    """Opens slabs when they are first used. Thread-safe; files are opened outside its lock."""

    def __init__(self, backend: Backend, max_open: int = MAX_OPEN) -> None:
        self._backend = backend
        self._max_open = max_open
        self._opened: OrderedDict[str, _Opened] = OrderedDict()
        self._lock = Lock()

    @contextmanager
    def use(self, name: str, *, write: bool = False) -> Iterator[Slab]:
        """The slab `name`, open for as long as the caller is in the block.

        Raises:
            OSError: it cannot be opened.
        """
        opened = self._find(name, write) or self._keep(
            name, _Opened(self._backend.open(name, write=write), write=write)
        )
        try:
            yield opened.slab
        finally:
            with self._lock:
                opened.users -= 1
                closing = opened.slab if opened.forgotten and not opened.users else None
            if closing is not None:
                closing.close()

    def forget(self, name: str) -> None:
        """Close a slab, now or after its last use: its file may be another one by now, or none."""
        with self._lock:
            opened = self._opened.pop(name, None)
            closing = self._drop(opened) if opened is not None else None
        if closing is not None:
            closing.close()

    def close(self) -> None:
        """Close all slabs, each after its last use."""
        for name in list(self._opened):
            self.forget(name)

    def _find(self, name: str, write: bool) -> _Opened | None:
        with self._lock:
            opened = self._opened.get(name)
            if opened is None or (write and not opened.write):
                return None
            self._opened.move_to_end(name)
            opened.users += 1
            return opened

    def _keep(self, name: str, new: _Opened) -> _Opened:
        new.users = 1
        with self._lock:
            closing = [self._drop(self._opened.pop(name))] if name in self._opened else []
            self._opened[name] = new
            while len(self._opened) > self._max_open:
                closing.append(self._drop(self._opened.popitem(last=False)[1]))
        for slab in closing:
            if slab is not None:
                slab.close()
        return new

    @staticmethod
    def _drop(opened: _Opened) -> Slab | None:
        opened.forgotten = True
        return None if opened.users else opened.slab
