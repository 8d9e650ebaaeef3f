"""A router's processes, started as a test wants them and always ended."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import msgpack

from deepinfer_router.boot import Boot

BARE = (sys.executable, str(Path(__file__).with_name("bare_worker.py")))
PATIENCE_S = 60.0


def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Poll until `condition` is true and answers without an OSError; what it answered."""
    end = monotonic() + PATIENCE_S
    while True:
        try:
            if found := condition():
                return found
        except OSError:
            pass
        if monotonic() > end:
            raise AssertionError(f"not within {PATIENCE_S} s: {what or condition}")
        sleep(0.02)


class RouterProcess:
    """`with RouterProcess(arguments) as router`: a command that prints `... at HOST:PORT` and `http://HOST:PORT/`."""

    def __init__(self, arguments: Sequence[str], cwd: Path, pass_fds: Sequence[int] = ()) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            arguments, cwd=cwd, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, pass_fds=pass_fds
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def supervisor(cls, boot: Boot, cwd: Path, command: Sequence[str] = BARE) -> "RouterProcess":
        """A supervisor whose workers are started by `command`."""
        boot = boot._replace(worker_command=tuple(command))
        reading, writing = os.pipe()
        os.write(writing, msgpack.packb(boot._asdict()))
        os.close(writing)
        try:
            return cls([sys.executable, "-m", "deepinfer_router.supervise", str(reading)], cwd, [reading])
        finally:
            os.close(reading)

    def __enter__(self) -> "RouterProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE_S)
        assert self.process.stderr
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def said(self, text: str, times: int = 1) -> str:
        """Wait for a line with `text`, said so often; the last."""

        def lines() -> list[str]:
            return [line for line in self.lines if text in line]

        return str(until(lambda: len(lines()) >= times and lines()[-1], f"{text!r} in {self.lines}"))

    @property
    def port(self) -> int:
        """Clients'."""
        return int(self.said("serving at ").partition(", workers")[0].rpartition(":")[2])

    @property
    def admin_port(self) -> int:
        """Of metrics and status."""
        return int(self.said("status page at http://").rstrip("/").rpartition(":")[2])

    def get(self, path: str, *, admin: bool = False, method: str = "GET", headers: Any = None) -> tuple[int, Any]:
        """Status and body, which is read as JSON where it is. Raises OSError."""
        connection = HTTPConnection("127.0.0.1", self.admin_port if admin else self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, headers=headers or {})
            response = connection.getresponse()
            body = response.read().decode()
            is_json = body[:1] in ("{", "[", '"') or body.strip().isdigit()
            return response.status, json.loads(body) if is_json else body
        finally:
            connection.close()

    def ended(self) -> int:
        """Wait until it has ended; its exit code."""
        return self.process.wait(PATIENCE_S)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)
