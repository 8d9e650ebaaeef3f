"""What was answered, a line an item, so that a run that ends early goes on where it was.

The first line says how answers came about. Lines are appended whole, by one write each, and reach the disk before the
next; a line that a killed process or machine left torn at the end is cut off when the file is opened again.
"""

import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from deepinfer_vllm.evaluation.errors import EvaluationError

SCHEMA = "deepinfer.evaluation/1"
_FIRST = f'{{"schema": "{SCHEMA}", '.encode()

Json = dict[str, Any]


class ResultsFile:
    """A context manager; `records` holds what the file held, by id, and what was appended since. One thread."""

    def __init__(self, path: Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
        """Open or begin. `fresh`: begin anew, whatever results the file holds.

        Raises EvaluationError where another run has it open, where it holds results of other settings, and for anything
        that is no file of results, which stays as it is.
        """
        self.path = path
        self.records: dict[str, Json] = {}
        self._settings: Json = json.loads(json.dumps(settings))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise EvaluationError(f"{path}: {error.strerror}; name another place by --out") from None
        try:
            self._begin(fresh)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def append(self, record: Json) -> None:
        """Add the record of an item, by its "id". Raises EvaluationError where the disk takes no more."""
        self._write(record)
        self.records[record["id"]] = record

    def _begin(self, fresh: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EvaluationError(
                f"{self.path}: another run writes to it; wait for it, or name another --out"
            ) from None
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise EvaluationError(f"{self.path} is no regular file; name another place by --out")
        content = self.path.read_bytes()
        if not content.startswith(_FIRST) and not _FIRST.startswith(content):
            raise EvaluationError(f"{self.path} holds no results of an evaluation; name another place by --out")
        whole = content[: content.rfind(b"\n") + 1]
        lines = [] if fresh else [self._parsed(line, n) for n, line in enumerate(whole.splitlines(), 1)]
        begun = len(lines) > 1  # settings alone are those of a run that came to nothing
        if begun:
            self._compare(lines[0].get("settings"))
            self.records = {record["id"]: record for record in lines[1:]}
        os.ftruncate(self._file, len(whole) if begun else 0)
        if not begun:
            self._write({"schema": SCHEMA, "settings": self._settings})

    def _parsed(self, line: bytes, number: int) -> Json:
        try:
            record = json.loads(line)
            if number == 1 or isinstance(record["id"], str):
                return dict(record)
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise EvaluationError(f"{self.path}, line {number} is damaged: remove that line, or begin anew with --fresh")

    def _compare(self, there: Any) -> None:
        there = there if isinstance(there, dict) else {}
        changed = [
            f"{name} was {json.dumps(there.get(name))} and is {json.dumps(now.get(name))}"
            for now in [self._settings]
            for name in sorted(there.keys() | now.keys())
            if there.get(name) != now.get(name)
        ]
        if changed:
            raise EvaluationError(
                f"{self.path} holds results of other settings: {'; '.join(changed)}. "
                "Continue with the same, name another --out, or begin anew with --fresh"
            )

    def _write(self, value: Json) -> None:
        line = json.dumps(value).encode() + b"\n"
        try:
            written = os.write(self._file, line)
            if written != len(line):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise EvaluationError(f"{self.path}: the disk is full; the same command continues once it is not")
            os.fsync(self._file)
        except OSError as error:
            raise EvaluationError(f"{self.path}: {error.strerror}; the same command continues") from None
