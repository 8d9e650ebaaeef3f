"""The child process that stands for `vllm serve`: it is watched, its failures are explained, nothing of it is left."""

import os
import sys
import time
from pathlib import Path

import pytest

from deepinfer_vllm import server_process
from deepinfer_vllm.server_process import ServerError, ServerProcess, find_reason

HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
{extra}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `vllm` command of which a test writes the source."""
    script = tmp_path / "vllm"
    monkeypatch.setattr(server_process, "vllm_script", lambda: script)
    return script


def write(script: Path, source: str) -> ServerProcess:
    script.write_text(f"#!{sys.executable}\n{source}")
    script.chmod(0o755)
    return ServerProcess(script.parent / "model", script.parent / "server.log")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_running(pid)


@pytest.mark.parametrize("extra", ["", IGNORES_SIGTERM], ids=["obedient", "deaf to SIGTERM"])
def test_stop_leaves_no_process(fake: Path, extra: str) -> None:
    with write(fake, HEALTHY.format(extra=extra)) as server:
        server.wait_until_healthy(20)
        child = int(server.log_text().split()[1])
        assert is_running(child)
        server.stop(timeout_seconds=1)
    assert server.exit_code is not None
    assert gone_within(child, 5)


def test_interrupt_stops_the_server(fake: Path) -> None:
    with pytest.raises(KeyboardInterrupt), write(fake, HEALTHY.format(extra="")) as server:
        server.wait_until_healthy(20)
        raise KeyboardInterrupt
    assert gone_within(int(server.log_text().split()[1]), 5)


def test_early_end_is_explained(fake: Path) -> None:
    source = "print('starting', flush=True)\nraise ValueError('compress_ratios[4]=3: must be 0, 1 or 2')"
    with pytest.raises(ServerError) as caught, write(fake, source) as server:
        server.wait_until_healthy(20)
    message = str(caught.value)
    assert "exit code 1" in message
    assert "reason: ValueError: compress_ratios[4]=3: must be 0, 1 or 2" in message
    assert "  | starting" in message


def test_waiting_is_bounded_and_reported(fake: Path) -> None:
    reports: list[float] = []
    with pytest.raises(ServerError, match=r"within 1\.5 seconds"), write(fake, "import time; time.sleep(60)") as server:
        server.wait_until_healthy(1.5, reports.append)
    assert len(reports) == 1


def test_only_this_machine_can_reach_it(fake: Path) -> None:
    server = write(fake, "")
    assert server.command[server.command.index("--host") + 1] == "127.0.0.1"


def test_server_is_not_in_our_process_group(fake: Path) -> None:
    """Ctrl-C in a terminal reaches a whole group: the server must not get it before we stop it in order."""
    with write(fake, "import os; print(os.getpgrp(), flush=True); import time; time.sleep(60)") as server:
        end = time.monotonic() + 10
        while not server.log_text() and time.monotonic() < end:
            time.sleep(0.05)
    assert int(server.log_text()) != os.getpgrp()


def test_reason_is_the_cause_and_not_its_echo() -> None:
    log = [
        "INFO all is well",
        "pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, heads=8: must be a multiple of 3",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert find_reason(log).endswith("1 validation error for ModelConfig Value error, heads=8: must be a multiple of 3")
    assert find_reason(log[:1]) == "none found in the log"
