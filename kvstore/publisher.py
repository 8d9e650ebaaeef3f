"""The thread by which blocks become visible: it appends to our journal, and folds all journals into the index."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Thread, current_thread
from time import monotonic
from typing import NamedTuple

from deepinfer_kvstore.follower import Applied
from deepinfer_kvstore.record import Record

_log = logging.getLogger(__name__)


class Publication(NamedTuple):
    """Records for our journal."""

    records: Sequence[Record]
    done: Callable[[int], None]
    """Called with how many of them, from the first on, are in the journal and in the index."""


class Publisher:
    """Runs rounds: at once when there is something to publish, else every `interval_s`. Thread-safe.

    What many threads want published in one round is one append and one transaction.
    """

    def __init__(
        self,
        append: Callable[[Sequence[Record]], int],
        fold: Callable[[], Applied],
        each_round: Callable[[], None],
        interval_s: float,
    ) -> None:
        """`append` returns how many records the journal has taken; `fold` applies journals to the index; `each_round`
        is for what has to be done now and then. None of them raises."""
        self._append = append
        self._fold = fold
        self._each_round = each_round
        self._interval_s = interval_s
        self._waiting: list[Publication] = []
        self._owed: list[Record] = []
        """What folding told us to append, and the journal has not taken: the index says it once."""
        self._begun = self._ended = 0
        self._wanted = 0
        self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="kvstore-publisher", daemon=True)
        self._thread.start()

    def publish(self, publication: Publication) -> None:
        """Publish in the next round."""
        with self._changed:
            if not self._closed:
                self._waiting.append(publication)
                self._changed.notify_all()
                return
        publication.done(0)

    def sync(self, seconds: float) -> bool:
        """Wait for a whole round, at most `seconds`; whether there was one. On the publisher's own thread, no."""
        with self._changed:
            if self._closed or current_thread() is self._thread:
                return False
            wanted = self._wanted = max(self._wanted, self._begun + 1)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._ended >= wanted, seconds)

    def close(self, seconds: float) -> bool:
        """Publish what waits and end, waiting at most `seconds`; whether it has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting or self._wanted > self._begun or self._closed, max(0.0, due - monotonic())
                )
                self._begun += 1
                round_number = self._begun
                publications, self._waiting = self._waiting, []
                closing = self._closed
            self._round(publications)
            due = monotonic() + self._interval_s
            with self._changed:
                self._ended = round_number
                self._changed.notify_all()
                if closing and not self._waiting:
                    return

    def _round(self, publications: list[Publication]) -> None:
        records = [record for publication in publications for record in publication.records]
        kept = 0
        with self._survived():
            kept = self._append(records) if records else 0
            self._owed += self._fold().superseded
            if self._owed:
                del self._owed[: self._append(self._owed)]
        for publication in publications:
            of_these = min(kept, len(publication.records))
            kept -= of_these
            with self._survived():
                publication.done(of_these)
        with self._survived():
            self._each_round()

    @contextmanager
    def _survived(self) -> Iterator[None]:
        """Nothing is published any more once this thread has ended."""
        try:
            yield
        except Exception:
            _log.exception("kv store: publishing ended in an error of the program")
