"""Runs a source of engines in a thread and keeps what it says."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

from deepinfer_router.discovery import Source, start


class Heard:
    """What a source has said so far."""

    def __init__(self) -> None:
        self.sets: list[list[dict[str, Any]]] = []
        self.lines: list[str] = []

    def found(self, source: str, engines: list[dict[str, Any]]) -> None:
        self.sets.append(engines)

    def failed(self, source: str, line: str) -> None:
        assert "\n" not in line
        self.lines.append(line)

    def urls(self) -> list[str]:
        """Of the last set."""
        return [engine["url"] for engine in self.sets[-1]] if self.sets else []

    def until(self, condition: Any) -> None:
        """Wait until `condition()`, a minute at most."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, (self.sets, self.lines)
            time.sleep(0.01)


@contextmanager
def listening(source: Source) -> Iterator[Heard]:
    """The source, running."""
    heard, stop = Heard(), Event()
    start(source, heard, stop)
    try:
        yield heard
    finally:
        stop.set()
