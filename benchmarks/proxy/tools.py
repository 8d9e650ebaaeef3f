"""The engines and clients in C, compiled when they are needed, and processes on a core of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from facts import ROOT

CORES = sorted(os.sched_getaffinity(0))
PROXY_CORE, OTHER_CORE = CORES[0], CORES[-1]
_SOURCES = ROOT / "benchmarks"
_TICKS = os.sysconf("SC_CLK_TCK")


def compiled(name: str) -> Path:
    """The program of benchmarks/`name`.c, made anew when its source has changed. Exits where there is no compiler."""
    source, program = _SOURCES / f"{name}.c", ROOT / "build" / name
    if program.exists() and program.stat().st_mtime > source.stat().st_mtime:
        return program
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        sys.exit("router.py: needs a C compiler, and there is neither gcc nor cc: on Debian, apt-get install gcc")
    program.parent.mkdir(exist_ok=True)
    fresh = program.with_suffix(f".{os.getpid()}")
    subprocess.run([compiler, "-O2", "-Wall", "-Wextra", "-o", fresh, source], check=True)
    fresh.rename(program)
    return program


def request(body: Any, path: str = "/v1/chat/completions", headers: str = "") -> bytes:
    """An HTTP request as bytes."""
    data = json.dumps(body, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{headers}"
    head += f"content-length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def _of_python(path: str) -> bool:
    """Another interpreter has its own."""
    return path.startswith((sys.prefix, sys.base_prefix))


class Process:
    """A child and its own children, all on one core."""

    def __init__(self, command: Sequence[str | Path], core: int, log: Path) -> None:
        self._log = log
        with log.open("wb") as out:
            self._child = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=out,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if not _of_python(path))},
            )

    def line(self) -> str:
        """The next line that it prints. Raises RuntimeError when it ends instead."""
        assert self._child.stdout
        found = self._child.stdout.readline().decode().strip()
        if not found:
            raise RuntimeError(f"{self._child.args} has ended: {self._log.read_text(errors='replace')[-2000:]}")
        return found

    def wait_for(self, ready: Callable[[], bool], seconds: float = 60.0) -> None:
        """Until `ready()`. Raises RuntimeError when it ends or the time is up."""
        deadline = time.monotonic() + seconds
        while not ready():
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._child.args} is not ready: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def cpu_seconds(self) -> float:
        """User and system time of the tree."""
        total = 0
        for pid in self._tree(self._child.pid):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / _TICKS

    def rss_mb(self) -> float:
        """Resident memory of the tree; what processes share counts for each."""
        total = 0
        for pid in self._tree(self._child.pid):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
        return total / 1024

    def open_files(self, ports: Collection[int]) -> tuple[int, int]:
        """Descriptors of the tree: connections to these ports of this host are the second number, all others the
        first."""
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        inodes = {f"socket:[{row[9]}]" for row in rows if int(row[2].rpartition(":")[2], 16) in ports}
        counts = [0, 0]
        for pid in self._tree(self._child.pid):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # it has been closed
                    counts[os.readlink(descriptor) in inodes] += 1
        return counts[0], counts[1]

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what is left."""
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _tree(self, pid: int) -> list[int]:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return []
        return [pid, *(found for child in children for found in self._tree(int(child)))]


@contextlib.contextmanager
def engines(count: int, scratch: Path) -> Iterator[list[str]]:
    """URLs of `count` engines in C."""
    process = Process([compiled("router_mock"), str(count)], OTHER_CORE, scratch / "mock.log")
    try:
        yield [f"http://127.0.0.1:{process.line()}" for _ in range(count)]
    finally:
        process.stop()


class Measured(NamedTuple):
    """What clients saw and what it took of the process that was asked."""

    load: dict[str, Any]
    """The line of router_load."""
    cpu_us: float
    """Of the proxy, in the time that counts."""
    rss_mb: float
    """At its end."""


def load(
    port: int,
    data: bytes,
    scratch: Path,
    *,
    connections: int,
    seconds: float,
    warmup: float = 1.0,
    rate: float = 0.0,
    proxy: Process | None = None,
) -> Measured:
    """Clients that send `data` in closed loops; `rate`: requests a second of all together, 0: as fast as they can."""
    file = scratch / "request"
    file.write_bytes(data)
    numbers = (port, connections, warmup, seconds, rate)
    client = Process([compiled("router_load"), *map(str, numbers), file], OTHER_CORE, scratch / "load.log")
    try:
        client.line()
        before = proxy.cpu_seconds() if proxy else 0.0
        client.line()
        after, rss = (proxy.cpu_seconds(), proxy.rss_mb()) if proxy else (0.0, 0.0)
        return Measured(json.loads(client.line()), (after - before) * 1e6, rss)
    finally:
        client.stop()
