"""README's Python example, as a reader would run it: saved to a file."""

import os
import re
import subprocess
import sys
from pathlib import Path

from deepinfer_vllm.checkpoint.create import create


def test_the_example_runs_from_a_file(root: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    create(tmp_path / "DIR")
    (tmp_path / "example.py").write_text(example)
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
