"""The proxies that are compared, each as a process on its core that listens and answers."""

from __future__ import annotations

import contextlib
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepinfer_vllm.server_process import free_port
from proxy.tools import PROXY_CORE, Process, request

VLLM_ROUTER = "vllm-router 0.1.17"
ROUTER_PYTHON = sys.executable
"""What runs our router: `--python` of the command line. How an interpreter was built decides a fifth of its speed."""
PROBE = {"model": "mock", "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}


class Running:
    """A proxy that answers."""

    def __init__(self, process: Process, port: int, admin_port: int | None = None) -> None:
        self.process = process
        self.port = port
        self.admin_port = admin_port


@contextlib.contextmanager
def ours(scratch: Path, name: str, settings: Sequence[str], config: str = "") -> Iterator[Running]:
    """`deepinfer router` with `settings` of its command line, and a configuration file if it is not empty."""
    port, admin = free_port(), free_port()
    command = [ROUTER_PYTHON, "-m", "deepinfer_vllm.cli.main", "router", *settings]
    command += ["--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin}"]
    if config:
        file = scratch / f"{name}.yaml"
        file.write_text(config)
        command += ["--config", str(file)]
    with _answering(command, port, scratch / f"{name}.log", admin) as running:
        yield running


@contextlib.contextmanager
def vllm_router(scratch: Path, name: str, program: str, settings: Sequence[str]) -> Iterator[Running]:
    """`settings`: engines and policy."""
    port = free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--log-level", "error", *settings]
    with _answering(command, port, scratch / f"{name}.log") as running:
        yield running


@contextlib.contextmanager
def haproxy(scratch: Path, program: str, urls: Sequence[str]) -> Iterator[Running]:
    """One thread, round robin, without the delay that it adds to small pieces by default."""
    port = free_port()
    servers = "\n".join(f"  server e{number} {url.removeprefix('http://')}" for number, url in enumerate(urls))
    file = scratch / "haproxy.cfg"
    file.write_text(
        "global\n  nbthread 1\n  maxconn 4000\ndefaults\n  mode http\n  option http-no-delay\n  http-reuse always\n"
        "  timeout connect 1s\n  timeout client 300s\n  timeout server 300s\n"
        f"frontend f\n  bind 127.0.0.1:{port}\n  default_backend b\nbackend b\n  balance roundrobin\n{servers}\n"
    )
    with _answering([program, "-f", str(file)], port, scratch / "haproxy.log") as running:
        yield running


def found(name: str, wanted: str | None) -> str | None:
    """Path of a program: the one that is wanted, one beside this Python, or one on PATH."""
    if wanted:
        return wanted
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or shutil.which(name, path="/usr/sbin")


@contextlib.contextmanager
def _answering(command: Sequence[str], port: int, log: Path, admin_port: int | None = None) -> Iterator[Running]:
    process = Process(command, PROXY_CORE, log)
    try:
        process.wait_for(lambda: _answers(port))
        yield Running(process, port, admin_port)
    finally:
        process.stop()


def _answers(port: int) -> bool:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=request(PROBE).partition(b"\r\n\r\n")[2],
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
