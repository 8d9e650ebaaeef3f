"""A `vllm serve` child process: started, watched until it answers, and stopped together with its own children.

For the demo, the tests and benchmarks on one machine. Loads neither vLLM nor torch into the calling process.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

V41_FLAGS = (
    *("--tokenizer-mode", "deepseek_v41"),
    *("--tool-call-parser", "deepseek_v41"),
    "--enable-auto-tool-choice",
    *("--reasoning-parser", "deepseek_v41"),
)
"""What V4.1's chat form, tool calls and reasoning need."""

SMALL_CPU_FLAGS = (
    *("--dtype", "float32"),
    "--enforce-eager",
    *("--max-model-len", "4096"),
    *("--kv-cache-memory-bytes", str(256 * 2**20)),
    # Weights without training love white space, which JSON allows without end.
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)
"""For a tiny checkpoint on a small machine. Without a given size, vLLM asks for nearly all memory for its KV cache."""

SMALL_CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # what was built is read from the log
    "TORCH_COMPILE_DISABLE": "1",  # the first request for logprobs would compile a kernel for 20 s
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's process is also the worker's: one process fewer
}
"""Without these, a tiny model's time goes to threads that wait for each other and to compilers."""

LOG_TAIL_LINES = 25
_ERROR_LINE = re.compile(r"(?:^|[\s.])\w*(?:Error|Exception): \S")
_ECHO = "Engine core initialization failed"  # what vLLM's front end adds to an error of its engine


class ServerError(RuntimeError):
    """The server did not come up. The message says why and ends with the last lines of its log."""


class ServerProcess:
    """One `vllm serve MODEL` on a free port of 127.0.0.1, in a process group of its own.

    A context manager: leaving it stops the server, also on an exception or Ctrl-C. Not for use by several threads.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        flags: Sequence[str] = (*V41_FLAGS, *SMALL_CPU_FLAGS),
        environment: Mapping[str, str] = SMALL_CPU_ENVIRONMENT,
    ) -> None:
        self.log = log
        self.url = f"http://127.0.0.1:{free_port()}"
        port = self.url.rpartition(":")[2]
        self.command = [str(vllm_script()), "serve", str(model), "--host", "127.0.0.1", "--port", port, *flags]
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone; we stop the server
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """None while the process runs."""
        return self._running().poll()

    def wait_until_healthy(self, timeout_seconds: float, progress: Callable[[float], None] = lambda _: None) -> float:
        """Seconds until the server answered /health; `progress` is called with the seconds so far, about once each.

        Raises ServerError when the process ends first or the time is up.
        """
        start = time.monotonic()
        next_report = 1.0
        while not self.is_healthy():
            waited = time.monotonic() - start
            if self.exit_code is not None:
                raise ServerError(self._failure(f"vllm serve ended with exit code {self.exit_code}"))
            if waited > timeout_seconds:
                raise ServerError(self._failure(f"vllm serve did not answer within {timeout_seconds:g} seconds"))
            if waited >= next_report:
                progress(waited)
                next_report += 1
            time.sleep(0.1)
        return time.monotonic() - start

    def is_healthy(self) -> bool:
        """Whether /health answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, timeout_seconds: float = 20) -> int:
        """End the server and every process it started; its exit code. SIGTERM first, SIGKILL when the time is up."""
        return stop_group(self._running(), timeout_seconds)

    def log_text(self) -> str:
        """What the server has written so far."""
        return self.log.read_text(errors="replace")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("ServerProcess is not started: use it in a `with` statement")
        return self._process

    def _failure(self, what: str) -> str:
        lines = self.log_text().splitlines()
        tail = "\n".join(f"  | {line}" for line in lines[-LOG_TAIL_LINES:])
        return f"{what}\nreason: {find_reason(lines)}\nlast lines of {self.log}:\n{tail}"


def stop_group(process: subprocess.Popen[bytes], timeout_seconds: float) -> int:
    """End a process that leads a group, and the group; its exit code. SIGTERM first, SIGKILL when the time is up."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of the group, its leader included
        code = process.wait()
    return code


def find_reason(log_lines: Sequence[str]) -> str:
    """The last error in a log that is more than an echo of another; a validation error's first detail goes with it."""
    for number in reversed(range(len(log_lines))):
        line = log_lines[number]
        if _ERROR_LINE.search(line) and _ECHO not in line:
            detail = log_lines[number + 1].strip() if log_lines[number + 1 :] and "validation error" in line else ""
            return f"{line.strip()} {detail}".strip()
    return "none found in the log"


def vllm_script() -> Path:
    """The `vllm` command beside this interpreter. Raises ServerError without one."""
    script = Path(sys.executable).with_name("vllm")
    if not script.is_file():
        raise ServerError(f"{script} does not exist: install vLLM beside this Python with `make install`")
    return script


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
