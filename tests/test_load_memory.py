"""Loading takes no more memory than what is held and two shards, whatever lies mapped beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.vllm
@pytest.mark.parametrize("weights", ["packed", "bf16"])
def test_anonymous_memory_is_bounded(weights: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "benchmarks/load_memory.py",
        "--size",
        "small",
        "--backend",
        "bare",
        "--weights",
        weights,
    ]
    arguments = ["--scratch", str(tmp_path), "--out", str(report)]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    measured = json.loads(report.read_text())
    stored = measured["checkpoint"]
    assert measured["within"] and measured["growth_bytes"] <= measured["held_bytes"] + 2 * stored["largest_shard_bytes"]
    # The bound would mean little if the tables were small, or the shards large.
    assert stored["table_bytes"] > 1 << 30 and stored["on_disk_bytes"] < stored["bytes"] - stored["table_bytes"] / 2
    assert stored["largest_shard_bytes"] < 0.2 * measured["held_bytes"]
    loaded = stored["bytes"] - stored["table_bytes"]
    times = measured["held_bytes"] / loaded
    assert 1 <= times < 1.1 if weights == "packed" else 3 < times < 4
    assert len(measured["tokens"]) == 2
