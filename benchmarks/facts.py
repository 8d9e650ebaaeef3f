"""What a record of measurements says of itself, so that others can take it again: command, commit, day and machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def facts(command: str = "") -> dict[str, Any]:
    """`command` is how this was called, where that is not this process's own command line."""
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "command": command or " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "cpu": cpu.partition(":")[2].strip() or platform.processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": _version("torch"),
            "vllm": _version("vllm"),
        },
    }


def keep(results: dict[str, Any], directory: Path, name: str, page: str = "") -> Path:
    """`name`.json in `directory` and, if there is a page to it, `name`.md; the path of the latter."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    path = directory / f"{name}.md"
    if page:
        path.write_text(page)
    return path


def _version(distribution: str) -> str:
    """What the router's benchmark can do without."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"
