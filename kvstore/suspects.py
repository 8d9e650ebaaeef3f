"""Blocks that the index has but that could not be loaded: not promised again for a while."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from time import monotonic

from deepinfer_kvstore.keys import Key

MAX_KEYS = 65_536


class Suspects:
    """Keys with an expiry, the oldest giving way. Thread-safe."""

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: OrderedDict[Key, float] = OrderedDict()
        self._lock = Lock()

    def add(self, key: Key) -> None:
        """Suspect `key` from now on."""
        with self._lock:
            self._until[key] = self._clock() + self._seconds
            self._until.move_to_end(key)
            if len(self._until) > MAX_KEYS:
                self._until.popitem(last=False)

    def clear(self, key: Key) -> None:
        """It was stored again."""
        if self._until:
            with self._lock:
                self._until.pop(key, None)

    def __bool__(self) -> bool:
        return bool(self._until)

    def __contains__(self, key: Key) -> bool:
        if not self._until:
            return False
        with self._lock:
            until = self._until.get(key)
            if until is not None and self._clock() >= until:
                del self._until[key]
                return False
            return until is not None
