"""What drafts' confidences were and how many of their tokens stood, recorded by engines into one file.

The file holds lines of JSON, each whole by itself: what the drafts are of, and rows in base64 under a checksum. Several
engines may append to one file, and one that is killed leaves at most half a line, which readers pass over. No token and
no text is in it. The steps of an engine only ever touch memory: a thread writes once a second, and what a slow or full
disk does not take is dropped.
"""

import base64
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.calibration_file import Made

SCHEMA = "deepinfer.dspark-records/1"
LIMIT_BYTES = 64 << 20
"""Of the file, about two million drafts of five tokens. An engine that finds it as long appends nothing."""
WAITING_BYTES = 1 << 20
"""Of rows in memory; those beyond are dropped."""
EVERY_SECONDS = 1.0
MAX_LINE_BYTES = 2 * WAITING_BYTES


class Recorder:
    """Appends to the file at `path`, whichever file that is at the time: moved away or deleted, it is begun anew.

    `record` is for one thread. `say` gets a line, once, when drafts cannot be written; from which thread is open.
    """

    def __init__(self, path: Path, made: Made, say: Callable[[str], None], *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path, self._made, self._say, self._limit_bytes = path, made, say, limit_bytes
        self._row = row_type(made.positions)
        self._waiting = bytearray()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._said = False
        self._thread = threading.Thread(target=self._run, name="dspark-records", daemon=True)
        self._thread.start()

    def record(
        self,
        confidences: NDArray[np.floating],
        drafted: NDArray[np.integer],
        accepted: NDArray[np.integer],
        requests: Sequence[str],
    ) -> None:
        """Raw confidences [R, S]; how many drafted tokens were verified and how many of these stood [R]; ids [R].

        Requests of which nothing was verified are left out. Microseconds; never raises for what a disk does.
        """
        rows = np.zeros(len(drafted), self._row)
        rows["confidences"], rows["drafted"], rows["accepted"] = confidences, drafted, accepted
        rows["request"] = [zlib.crc32(name.encode(errors="replace")) for name in requests]
        encoded = rows[rows["drafted"] > 0].tobytes()
        with self._lock:
            keeps_up = len(self._waiting) + len(encoded) <= WAITING_BYTES
            if keeps_up:
                self._waiting += encoded
        if not keeps_up:
            self._say_once("its disk does not keep up")

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Write what waits, unless the disk takes longer than that."""
        self._closing.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(EVERY_SECONDS)
            with self._lock:
                rows, self._waiting = bytes(self._waiting), bytearray()
            if rows:
                try:
                    self._append(_line(self._made, rows))
                except OSError as error:
                    self._say_once(f"{error.strerror or error}; free its disk, or name another file")

    def _append(self, line: bytes) -> None:
        # Opened each time, so that deleting the file is all it takes to record afresh.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(descriptor).st_size + len(line) > self._limit_bytes:
                self._say_once(f"it has its {self._limit_bytes >> 20} MiB; fit from it, and delete it to go on")
            else:
                os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def _say_once(self, reason: str) -> None:
        if not self._said:
            self._said = True
            self._say(f"Drafts that {self._path} should record are lost: {reason}. Generation goes on.")


@dataclass(frozen=True)
class Records:
    """Drafts in the order of the file: confidences [N, S] float32, and by draft [N] integers."""

    confidences: NDArray[np.float32]
    drafted: NDArray[np.uint8]
    accepted: NDArray[np.uint8]
    requests: NDArray[np.uint32]


def read(path: Path) -> dict[Made, Records]:
    """The drafts of a file, by what they are of. Lines that are no whole ones are passed over. Raises OSError."""
    rows: dict[Made, list[NDArray[Any]]] = {}
    with path.open("rb") as file:
        for line in _lines(file):
            found = _parsed(line)
            if found is not None:
                rows.setdefault(found[0], []).append(found[1])
    together = {made: np.concatenate(parts) for made, parts in rows.items()}
    return {
        made: Records(*(all_rows[name] for name in ("confidences", "drafted", "accepted", "request")))
        for made, all_rows in together.items()
    }


def row_type(positions: int) -> np.dtype[Any]:
    """How one draft lies in a line."""
    return np.dtype([("request", "<u4"), ("drafted", "u1"), ("accepted", "u1"), ("confidences", "<f4", (positions,))])


def _line(made: Made, rows: bytes) -> bytes:
    """It begins with a line feed too: half a line of an engine that was killed must not take this one with it."""
    value = {"schema": SCHEMA, **asdict(made), "crc32": zlib.crc32(rows), "rows": base64.b64encode(rows).decode()}
    return b"\n" + json.dumps(value).encode() + b"\n"


def _lines(file: Any) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) > 1:
            yield line


def _parsed(line: bytes) -> tuple[Made, NDArray[Any]] | None:
    try:
        value = json.loads(line)
        rows, made = base64.b64decode(value["rows"], validate=True), Made.from_json(value)
        if value["schema"] != SCHEMA or zlib.crc32(rows) != value["crc32"]:
            return None
        found = np.frombuffer(rows, row_type(made.positions))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    confidences = found["confidences"]
    sound = (found["accepted"] <= found["drafted"]) & (found["drafted"] <= made.positions)
    sound &= ((confidences >= 0) & (confidences <= 1)).all(axis=1)
    return made, found[sound]
