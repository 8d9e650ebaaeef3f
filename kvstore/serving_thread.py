"""A daemon inside another process: an engine that is alone on its node answers CHECK itself."""

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

from deepinfer_kvstore.daemon import Daemon, DaemonOptions


class ServingThread:
    """A daemon's event loop in a thread. A context manager; thread-safe."""

    def __init__(self, options: DaemonOptions) -> None:
        """Returns once every role has begun.

        Raises:
            StoreConfigError: it cannot be started as asked; see `Daemon`.
        """
        self.daemon = Daemon(options)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: Future[None] = Future()
        self._thread = Thread(target=self._run, name="kvstore-daemon", daemon=True)
        self._thread.start()
        self._started.result()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self.daemon.run(self._stop, lambda: self._started.set_result(None)))
            except BaseException as error:
                if self._started.done():
                    raise
                self._started.set_exception(error)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> "ServingThread":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
