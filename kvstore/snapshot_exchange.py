"""A node's part in sharing snapshots: tells the directory what it holds, and fetches what others hold.

All of it runs on a few threads, each call bounded in time, and what there is no room for is dropped: whoever asked
then has no snapshot.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore

from deepinfer_kvstore.snapshot_directory import Holder
from deepinfer_kvstore.snapshot_peers import SnapshotPeers
from deepinfer_kvstore.snapshots import SnapshotRing

QUEUE = 64
"""Announcements and searches under way or waiting; of more, the new ones are dropped."""


class SnapshotExchange:
    """Between a ring of this process and the directory at `host:port`. Thread-safe."""

    def __init__(
        self, ring: SnapshotRing, peers: SnapshotPeers, directory: str, address: str, workers: int = 2
    ) -> None:
        """`address`: `host:port` at which other nodes reach the server of this ring."""
        self._ring = ring
        self._peers = peers
        self._directory = directory
        self._address = address
        self._room = BoundedSemaphore(QUEUE)
        self._threads = ThreadPoolExecutor(workers, "snapshot-exchange")

    def announce(self, key: bytes) -> None:
        """Let others find a snapshot that the ring has been given."""
        self._start(lambda: self._announce(key))

    def search(self, wanted: Sequence[tuple[bytes, int]]) -> "Future[bool] | None":
        """Fetch the first snapshot of `wanted` (key, payload bytes; at most 1024) that another node holds.

        The future says whether the ring has been given one; None: too much is under way.
        """
        return self._start(lambda: self._search(wanted))

    def close(self) -> None:
        """Drop what has not begun, and wait for the rest."""
        self._threads.shutdown(cancel_futures=True)

    def _start(self, work: Callable[[], bool]) -> "Future[bool] | None":
        if not self._room.acquire(blocking=False):
            return None
        try:
            future = self._threads.submit(work)
        except RuntimeError:  # closed
            self._room.release()
            return None
        future.add_done_callback(lambda _: self._room.release())
        return future

    def _announce(self, key: bytes) -> bool:
        held = self._ring.describe(key)
        if held is None:
            return False
        length, digest, seconds = held
        return self._peers.announce(self._directory, key, Holder(self._address, length, digest, float(seconds)))

    def _search(self, wanted: Sequence[tuple[bytes, int]]) -> bool:
        found = self._peers.locate(self._directory, [key for key, _ in wanted])
        if found is None or found[1].address == self._address:
            return False
        key, payload_bytes = wanted[found[0]]
        payload = self._peers.fetch(key, found[1], payload_bytes)
        if payload is None:
            self._peers.withdraw(self._directory, key, found[1].address)
            return False
        held = self._ring.put(key, payload, key)
        if held:
            self._announce(key)
        return held
