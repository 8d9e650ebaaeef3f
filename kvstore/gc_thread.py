"""The thread that collects, and looks after slabs, inside an engine's process; at a low priority."""

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event, Thread, get_native_id

from deepinfer_kvstore.gc import Collector
from deepinfer_kvstore.upkeep import Upkeep

NICENESS = 10

_log = logging.getLogger(__name__)


class GcThread:
    """Takes steps again and again. Errors of the shared directory are logged, and it goes on."""

    def __init__(
        self, collector: Collector, upkeep: Upkeep, interval_s: float, evicted: Callable[[Mapping[str, int]], None]
    ) -> None:
        """`evicted` is told what each step evicted, blocks by reason."""
        self._collector = collector
        self._upkeep = upkeep
        self._interval_s = interval_s
        self._evicted = evicted
        self._closing = Event()
        self._thread = Thread(target=self._run, name="kvstore-gc", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> bool:
        """End, waiting at most `seconds`; whether it has. The lease is free then."""
        self._closing.set()
        self._collector.end()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError):  # Linux has a priority for each thread; it may be lower already
            os.setpriority(os.PRIO_PROCESS, get_native_id(), NICENESS)
        said = ""
        while not self._closing.wait(self._interval_s):
            # Each for itself: on a full disk collecting may lack what punched slots give back.
            trouble = "; ".join(filter(None, [self._attempt(self._collect), self._attempt(self._upkeep.step)]))
            if trouble and trouble != said:  # once while it stays the same
                _log.warning("kv store: collection: %s: it is tried again", trouble)
            said = trouble
        self._collector.release()

    def _collect(self) -> None:
        self._evicted(self._collector.step().evicted)

    @staticmethod
    def _attempt(work: Callable[[], None]) -> str:
        """What went wrong; empty where nothing did."""
        try:
            work()
        except OSError as error:
            return str(error)
        except Exception:  # nothing is collected any more once this thread has ended
            _log.exception("kv store: collection ended in an error of the program")
        return ""
