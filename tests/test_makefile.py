"""`make` alone lists every target."""

import os
import re
import subprocess
from pathlib import Path


def test_help_lists_every_target(root: Path) -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    # `make test` hands its own flags down: with -w, make prints the directory too.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make"], cwd=root, env=outside, capture_output=True, text=True, check=True)
    assert [line.split()[1] for line in done.stdout.splitlines()] == phony.split()
