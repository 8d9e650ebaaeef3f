"""A line of JSON a request, appended to a file by a thread."""

import os
from random import random
from typing import Any

import orjson

from deepinfer_router.background_writer import BackgroundWriter
from deepinfer_router.metrics import counter
from deepinfer_router.telemetry_config import AccessLogConfig

LINES = counter("access_log_lines", "Lines of the access log: written, dropped (too many waited), failed.", "result")
_WRITTEN, _DROPPED, _FAILED = LINES.labels("written"), LINES.labels("dropped"), LINES.labels("failed")


class AccessLog:
    """Appends whole lines, so that several workers may write one file. What the disk does not take is counted."""

    def __init__(self, config: AccessLogConfig) -> None:
        assert config.path
        self._path = config.path
        self._ratio = config.sample_ratio
        self._file: int | None = None
        self._reopen = False
        self._writer = BackgroundWriter(
            "access log", self._append, _DROPPED.inc, most=config.max_lines, interval_s=config.interval_s
        )
        self.add = self._writer.add
        """Takes a dict of what JSON can say."""

    def wanted(self, status: int) -> bool:
        """Whether a request with this outcome is logged: failures always."""
        return status >= 400 or self._ratio >= 1 or random() < self._ratio

    def reopen(self) -> None:
        """The file has been moved away: begin a new one with the next line."""
        self._reopen = True

    def close(self) -> None:
        """Write what there is."""
        self._writer.close()

    def _append(self, lines: list[dict[str, Any]]) -> None:
        try:
            if self._reopen and self._file is not None:
                self._reopen = False
                os.close(self._file)
                self._file = None
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
            left = b"".join(orjson.dumps(line, default=str, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
            while left:
                left = left[os.write(self._file, left) :]
            _WRITTEN.inc(len(lines))
        except OSError:
            _FAILED.inc(len(lines))
