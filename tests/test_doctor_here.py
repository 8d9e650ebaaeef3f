"""The doctor in the environment that runs the tests, which `make install` has made."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.vllm
def test_every_check_passes_here() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DEEPINFER_", "VLLM_PLUGINS"))}
    script = Path(sys.executable).with_name("deepinfer")
    done = subprocess.run([script, "doctor", "--json"], capture_output=True, text=True, env=environ)
    report = json.loads(done.stdout)
    assert [row for row in report["checks"] if row["status"] == "fail"] == []
    assert done.returncode == 0
    found = {row["name"]: row["found"] for row in report["checks"]}
    assert found["vllm.LLM"].endswith(".LLM")
    assert found["vLLM platform"].startswith("cpu ")
    assert found["DeepSeek-V4.1 model"].startswith("portable: deepinfer_vllm.models.")
