"""The loads of a running engine into a trace file that `deepinfer eplb analyze` reads."""

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_vllm.eplb import trace

MAX_STEPS = 4096
MAX_BYTES = 256 * 2**20

logger = logging.getLogger("vllm.deepinfer")


def step_limit(layers: int, experts: int) -> int:
    """How many steps are recorded of a model of these sizes."""
    return min(MAX_STEPS, max(1, MAX_BYTES // (4 * layers * experts)))


class Recorder:
    """Keeps what it is given and writes all of it whenever that has doubled, beside the engine's work.

    So a file is there early, holds more than half of what was seen when the engine dies, and costs little. Nothing a
    disk does reaches the engine.
    """

    def __init__(self, path: Path, limit: int, meta: dict[str, Any]) -> None:
        self._path, self._limit, self._meta = path, limit, meta
        self._blocks: list[Any] = []
        self._steps = self._written = 0
        self._writer: threading.Thread | None = None

    def add(self, counts: Any) -> None:
        """The next steps, [T, L, E] int32. Beyond the limit nothing is kept."""
        counts = counts[: self._limit - self._steps]
        if not len(counts):
            return
        self._blocks.append(counts)
        self._steps += len(counts)
        if self._steps >= self._limit or self._steps >= 2 * self._written:
            self.wait()
            self._written = self._steps
            self._writer = threading.Thread(target=self._write, args=(list(self._blocks),), daemon=True)
            self._writer.start()
        if self._steps >= self._limit:
            self._blocks = []

    def wait(self) -> None:
        """Until what is being written is on the disk."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, blocks: list[Any]) -> None:
        try:
            counts = np.concatenate(blocks)
            trace.write(self._path, counts, self._meta)
            more = "; no more is recorded" if len(counts) >= self._limit else ""
            logger.info("Loads of experts in %d steps are in %s%s.", len(counts), self._path, more)
        except OSError as error:
            logger.warning("Loads of experts could not be written to %s: %s.", self._path, error)
