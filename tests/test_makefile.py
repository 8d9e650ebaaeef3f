"""`make` alone lists every target."""

import re
import subprocess
from pathlib import Path


def test_help_lists_every_target(root: Path) -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run(["make"], cwd=root, capture_output=True, text=True, check=True)
    assert [line.split()[1] for line in done.stdout.splitlines()] == phony.split()
