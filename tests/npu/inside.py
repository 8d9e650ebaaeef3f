"""Processes in which vLLM finds the emulated device. In the tests' own, torch would keep it for all that come after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
SECONDS = 600.0
EMULATED = {
    "vllm.platform_plugins": "npu.vllm_platform:platform",
    "vllm.general_plugins": "npu.vllm_platform:accept_runner_v2",
}


def run_inside(folder: Path, *command: str, plugins: dict[str, str] | None = None, **environment: str) -> str:
    """What `python COMMAND...` prints, with plugins of vLLM by group; `folder` gets what makes them known to vLLM.

    Raises AssertionError with all that it said if it fails.
    """
    metadata = folder / "emulated_npu-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated_npu\nVersion: 0\n")
    groups = [f"[{group}]\nemulated_npu = {function}\n" for group, function in (plugins or EMULATED).items()]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    paths = os.pathsep.join([str(folder), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_cases(folder: Path, *cases: str, **environment: str) -> str:
    """The tests of files here, each of which must pass."""
    files = [f"tests/npu/{each}" for each in cases]
    said = run_inside(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, **environment)
    assert " passed" in said and "skipped" not in said
    return said
