"""Disks that are really full, or really read-only: a tmpfs of a megabyte, mounted where only the test sees it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]


@pytest.fixture(scope="session", autouse=True)
def mounts() -> None:
    """Whether this user may mount in a namespace of its own."""
    try:
        done = subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare(1)")
    if done.returncode:
        pytest.skip(f"no mounts for this user: {done.stderr.strip()}")


@pytest.mark.parametrize("case", ["full_root", "read_only_root", "full_index"])
def test_disk(tmp_path: Path, case: str) -> None:
    """# Tanguille/cluster#4636. Each case says in `small_disk.py` what is seen."""
    command = [*OWN_MOUNTS, sys.executable, str(Path(__file__).with_name("small_disk.py")), case, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "seen\n"
