"""A slice of `make soak`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


def soak(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tests/soak/kvstore.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_twenty_seconds_of_harm_give_no_wrong_byte(root: Path) -> None:
    done = soak(root, "--minutes", "0.33", "--seed", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    *_, summary, verdict = done.stdout.splitlines()
    assert verdict == "no byte was wrong"
    counts = {name: int(count) for name, count in re.findall(r"([a-zA-Z][a-zA-Z ()]*?) (\d+)", summary)}
    for happened in ("hits", "stored", "killed", "slab bits", "right at the end"):
        assert counts[happened] > 0, summary


@pytest.mark.parametrize("arguments", [("--minutes", "0"), ("--minutes", "1", "--writers", "0")])
def test_bad_options_are_refused_in_one_line(root: Path, arguments: tuple[str, ...]) -> None:
    done = soak(root, *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--minutes must be above 0 and --writers at least 1")
