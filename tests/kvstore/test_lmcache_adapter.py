"""LMCache over our store, in an environment of its own: `make lmcache`."""

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("LMCACHE_PYTHON", "")

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="LMCACHE_PYTHON names no interpreter with lmcache 0.5, which does not live in one with vLLM"
)


@pytest.mark.parametrize("phases", [("first", "second"), ("coded",), ("mistakes",)], ids="-".join)
def test_through_lmcaches_own_interface(root: Path, tmp_path: Path, phases: tuple[str, ...]) -> None:
    """Each phase is a process, so the second one is a restart."""
    (tmp_path / "root").mkdir()
    for phase in phases:
        done = subprocess.run(
            [PYTHON, str(root / "tests" / "lmcache_round_trip.py"), str(tmp_path / "root"), phase],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.endswith("done\n")
