"""The official client's smoke script against the server."""

import subprocess
import sys
from pathlib import Path

from deepinfer_vllm.server_process import ServerProcess


def test_smoke_script(root: Path, server: ServerProcess) -> None:
    command = [sys.executable, root / "examples" / "openai_client.py", "--base-url", f"{server.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    checks = [line.split()[0] for line in done.stdout.splitlines()]
    assert checks == ["chat", "stream", "tools", "json_schema", "logprobs", "n", "stop"]
