"""Which node holds which snapshot: a hint, checked by whoever fetches.

In memory only. Losing it, or any line of it, costs windows that are computed again.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from time import monotonic
from typing import NamedTuple


class Holder(NamedTuple):
    """Where a snapshot can be fetched, and what it must be."""

    address: str
    """`host:port` of the node's snapshot server."""
    length: int
    """Payload bytes."""
    digest: bytes
    """As `snapshots.digest_of` made it where the snapshot was taken."""
    seconds: float
    """Until it expires there."""


class SnapshotDirectory:
    """Snapshot key to the node that announced it last. Thread-safe; of more than `capacity` keys, the oldest go."""

    def __init__(self, capacity: int = 1 << 17, *, clock: Callable[[], float] = monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._lock = Lock()
        self._holders: OrderedDict[bytes, tuple[Holder, float]] = OrderedDict()

    def announce(self, key: bytes, holder: Holder) -> None:
        """`holder` has the snapshot `key` from now on, for `holder.seconds`."""
        with self._lock:
            self._holders[key] = holder, self._clock() + holder.seconds
            self._holders.move_to_end(key)
            while len(self._holders) > self._capacity:
                self._holders.popitem(last=False)

    def withdraw(self, key: bytes, address: str) -> None:
        """Forget that `address` holds `key`: it no longer does, or whoever asked it got nothing."""
        with self._lock:
            found = self._holders.get(key)
            if found is not None and found[0].address == address:
                del self._holders[key]

    def locate(self, keys: Sequence[bytes]) -> tuple[int, Holder] | None:
        """(position in `keys`, holder) of the first key that some node holds."""
        with self._lock:
            for position, key in enumerate(keys):
                found = self._holders.get(key)
                if found is None:
                    continue
                left = found[1] - self._clock()
                if left > 0:
                    return position, found[0]._replace(seconds=left)
                del self._holders[key]
        return None

    def __len__(self) -> int:
        with self._lock:
            return len(self._holders)
