"""What a record of measurements says of itself, so that others can take it again: command, commit, day and machine.

Light: loads neither vLLM nor torch.
"""

import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deepinfer_vllm import __version__
from deepinfer_vllm.hidden_secrets import hidden_words

_ROOT = Path(__file__).resolve().parent.parent


def record_facts(words: Sequence[str]) -> dict[str, Any]:
    """words: of the command line; what is secret in them is hidden."""
    return {
        "command": shlex.join(hidden_words(words)),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "cpu": _cpu() or platform.processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": _version("torch"),
            "vllm": _version("vllm"),
        },
    }


def _commit() -> str:
    """Of the checkout that this runs from; an installed package has its version alone."""
    if not (_ROOT / ".git").exists():
        return f"deepinfer-vllm {__version__}"
    try:
        told = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return told.stdout.strip() or "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("model name")), "").partition(":")[2].strip()


def _version(distribution: str) -> str:
    """What the router's benchmark can do without."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"
