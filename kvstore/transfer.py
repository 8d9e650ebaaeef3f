"""The handle of one asynchronous put or get."""

from collections.abc import Callable, Sequence
from threading import Condition
from time import monotonic


class Transfer:
    """Some blocks on their way. Thread-safe.

    Its buffers belong to the store until `done()`: an operation stuck in the kernel cannot be taken back, and may
    still write. A caller that cannot wait treats an `overdue()` transfer as missed, and keeps its buffers aside until
    it is done.
    """

    def __init__(self, blocks: int, deadline: float) -> None:
        """`deadline` is in seconds of `time.monotonic()`."""
        self.started = monotonic()
        self.deadline = deadline
        self.seconds = 0.0
        """Time it took; 0 until done."""
        self.bytes_moved = 0
        """Payload bytes of the blocks that succeeded."""
        self._results = [False] * blocks
        self._left = blocks
        self._changed = Condition()
        self._callbacks: list[Callable[[Transfer], None]] = []

    def settle(self, block: int, ok: bool, length: int = 0) -> None:
        """Say how block number `block` ended, once for each. Called by the store's threads."""
        self.settle_all((block,), ok, length)

    def settle_all(self, blocks: Sequence[int], ok: bool, length: int = 0) -> None:
        """`settle` each of `blocks`; `length` is that of all of them together."""
        with self._changed:
            for block in blocks:
                self._results[block] = ok
            self.bytes_moved += length if ok else 0
            self._left -= len(blocks)
            if self._left or not blocks:
                return
            self.seconds = monotonic() - self.started
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(self)

    def done(self) -> bool:
        """Whether every block has ended and the buffers are the caller's again."""
        with self._changed:
            return self._left == 0

    def overdue(self) -> bool:
        """Whether the deadline passed before every block ended."""
        return not self.done() and monotonic() > self.deadline

    def results(self) -> list[bool]:
        """For each block, whether it was stored, or loaded and verified. False for those still on their way."""
        with self._changed:
            return list(self._results)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until done, at most `seconds`; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0, seconds)

    def when_done(self, callback: Callable[["Transfer"], None]) -> None:
        """Call `callback(self)` once done: on a thread of the store, or at once if it is done already.

        It must not wait for the store, whose threads would then wait for it.
        """
        with self._changed:
            if self._left:
                self._callbacks.append(callback)
                return
        callback(self)
