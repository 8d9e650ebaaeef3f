"""The demo's fleet: a router before two engines, which asks the store's daemon what is there before it routes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deepinfer_vllm.server_process import ServerError, free_port, stop_group

STOP_SECONDS = 20.0


class Router:
    """A running `deepinfer router` and the store's daemon beside it."""

    def __init__(self, directory: Path, checkpoint: Path, engines: Sequence[str]) -> None:
        """`directory` has the store; see `demo_store.store_flags`."""
        self.url = f"http://127.0.0.1:{free_port()}"
        self.admin = f"http://127.0.0.1:{free_port()}"
        self._socket = directory / "check.sock"
        self._config = directory / "router.json"
        settings = {
            "listen": self.url.removeprefix("http://"),
            "admin": {"listen": self.admin.removeprefix("http://")},
            "engines": [{"url": url} for url in engines],
            # Tokens are made here, so that the store can be asked for them.
            "entry": {"encoding": "recipe", "recipe": {"tokenizer": str(checkpoint.absolute() / "tokenizer.json")}},
            "store": {"socket": str(self._socket.absolute())},
        }
        self._config.write_text(json.dumps(settings))  # which is YAML too
        places = ("--root", str(directory / "store"), "--index-dir", str(directory / "index"))
        self.commands = [
            deepinfer("kvstore", *places, "--roles", "check,index", "--socket", str(self._socket)),
            deepinfer("router", "--config", str(self._config)),
        ]

    @contextmanager
    def running(self, log: Path, timeout_seconds: float) -> Iterator[Router]:
        """Until the `with` ends. Raises ServerError when it is not ready in time."""
        processes = []
        try:
            with log.open("wb") as written:
                for command in self.commands:
                    processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=written,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            self._wait(lambda: self._socket.exists() and self._ready(), processes, log, timeout_seconds)
            yield self
        finally:
            for process in reversed(processes):
                stop_group(process, STOP_SECONDS)

    def counts(self) -> dict[str, float]:
        """The router's metrics by name and labels, as Prometheus would read them."""
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name.removeprefix("deepinfer_router_"): float(value) for name, _, value in pairs}

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.admin}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @staticmethod
    def _wait(
        ready: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]], log: Path, timeout_seconds: float
    ) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not ready():
            ended = any(process.poll() is not None for process in processes)
            if ended or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
                why = "ended" if ended else f"were not ready within {timeout_seconds:g} seconds"
                raise ServerError(f"router or store daemon {why}\nlast lines of {log}:\n{tail}")
            time.sleep(0.1)


def deepinfer(*arguments: str) -> list[str]:
    """A command line of this interpreter's `deepinfer`."""
    return [sys.executable, "-m", "deepinfer_vllm.cli.main", *arguments]
