"""Runs alone in a subprocess: what vLLM's own resolver makes of each case in stdin's JSON, each in a fork of its own.

`python resolve_platform.py [TREE]`; TREE is a directory with another vLLM. A case has `paths` to import from first,
`environ`, and `root`, the file system with the devices. An answer has `platform`, the class and its bases, or `error`,
and `log`, what the plugin said.
"""

import importlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = sys.argv[1:]
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import vllm.platforms  # noqa: E402
from forked import in_a_fork  # noqa: E402

from deepinfer_vllm.platforms import ascend_platform, detection  # noqa: E402
from deepinfer_vllm.platforms.activation import let_through  # noqa: E402


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def answer(case: dict[str, Any]) -> dict[str, Any]:
    heard = Heard()
    logger = logging.getLogger("vllm.deepinfer")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    os.environ.update(case["environ"])
    sys.path[:0] = case["paths"]
    importlib.invalidate_caches()
    detection.ROOT = Path(case["root"])
    before = set(sys.modules)
    asked = range(3) if let_through("deepinfer_ascend") else ()
    answers = [ascend_platform() for _ in asked]
    loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
    vllm.platforms._current_platform = None
    try:
        platform = vllm.platforms.current_platform
    except RuntimeError as error:
        return {"error": str(error), "log": heard.lines}
    platform.log_warnings()  # as vLLM does once its log is set up
    return {
        "platform": [f"{base.__module__}.{base.__qualname__}" for base in type(platform).__mro__],
        "log": heard.lines,
        "idempotent": len(set(answers)) <= 1,
        "loaded": sorted(loaded & {"vllm", "torch", "vllm_ascend", "torch_npu"}),
        "vllm": vllm.__file__,
    }


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    json.dump([in_a_fork(answer, case) for case in json.load(sys.stdin)], output)
    output.close()
