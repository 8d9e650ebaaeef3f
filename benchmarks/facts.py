"""What a record of a benchmark says of itself, and where it is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from deepinfer_vllm.record_facts import record_facts

ROOT = Path(__file__).resolve().parent.parent


def facts(command: str = "") -> dict[str, Any]:
    """`command` is how this was called, where that is not this process's own command line."""
    return record_facts(command.split() or ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def keep(results: dict[str, Any], directory: Path, name: str, page: str = "") -> Path:
    """`name`.json in `directory` and, if there is a page to it, `name`.md; the path of the latter."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    path = directory / f"{name}.md"
    if page:
        path.write_text(page)
    return path
