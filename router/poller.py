"""A small event loop for the supervisor: sockets, timers, signals, and calls from other threads.

asyncio would do it too, for 9 MB more of resident memory (it loads OpenSSL), twice what the supervisor takes otherwise.
"""

import heapq
import selectors
import signal
import socket
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from threading import Event
from time import monotonic
from typing import IO, TypeVar

T = TypeVar("T")
Callback = Callable[[], None]
Watched = socket.socket | IO[bytes]


class Poller:
    """Runs callbacks on one thread until `stop`. Only `call` and `ask` may be used from others."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callback]] = []
        self._order = count()
        self._calls: deque[Callback] = deque()
        self._stopped = False
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain_wakes)
        self._handlers: dict[int, Callback] = {}

    def watch(self, sock: Watched, ready: Callback, *, write: bool = False) -> None:
        """Call `ready` whenever `sock` can be read, or with `write` also when it can be written. Replaces the last."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        try:
            self._selector.modify(sock, events, ready)
        except KeyError:
            self._selector.register(sock, events, ready)

    def forget(self, sock: Watched) -> None:
        """Watch it no longer."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def later(self, seconds: float, callback: Callback) -> None:
        """Call it in so many seconds."""
        heapq.heappush(self._timers, (monotonic() + seconds, next(self._order), callback))

    def on_signal(self, number: signal.Signals, callback: Callback) -> None:
        """Call it, on this loop, when the process gets that signal. Main thread only."""
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._handlers[number] = callback
        signal.signal(number, lambda number, frame: None)

    def call(self, callback: Callback) -> None:
        """Call it soon, on the loop's thread. From any thread."""
        self._calls.append(callback)
        with suppress(BlockingIOError, OSError):
            self._wake.send(b"\0")

    def ask(self, question: Callable[[Callable[[T], None]], None], patience_s: float) -> T | None:
        """What `question` answers, asked on the loop's thread; None where that takes too long. From other threads."""
        done = Event()
        found: list[T] = []

        def answer(value: T) -> None:
            found.append(value)
            done.set()

        self.call(lambda: question(answer))
        done.wait(patience_s)
        return found[0] if found else None

    def stop(self) -> None:
        """End `run` after the callback that calls this."""
        self._stopped = True

    def run(self) -> None:
        """Until `stop`."""
        while not self._stopped:
            wait = max(0.0, self._timers[0][0] - monotonic()) if self._timers else None
            for key, _ in self._selector.select(0 if self._calls else wait):
                self._run(key.data)
            for _ in range(len(self._calls)):
                self._run(self._calls.popleft())
            while self._timers and self._timers[0][0] <= monotonic() and not self._stopped:
                self._run(heapq.heappop(self._timers)[2])

    def close(self) -> None:
        """Give back its sockets."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _run(self, callback: Callback) -> None:
        try:
            callback()
        except Exception:
            traceback.print_exc()  # a fault here must not end the workers

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            while data := self._woken.recv(4096):
                for number in data:
                    if handler := self._handlers.get(number):
                        handler()
