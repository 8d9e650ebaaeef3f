"""Runs alone in a subprocess: makes the engine configuration of each case in stdin's JSON, in a fork of its own."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import vllm.platforms
from vllm.model_executor.models import ModelRegistry

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from forked import in_a_fork  # noqa: E402


def qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def said(action: Any) -> str:
    """What `action` raises, or ""."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def configure(case: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(case["environ"])
    sys.path.insert(0, case["path"])
    os.environ["PYTHONPATH"] = os.pathsep.join([case["path"], os.environ.get("PYTHONPATH", "")])
    importlib.invalidate_caches()
    vllm.platforms._current_platform = None
    from vllm.engine.arg_utils import EngineArgs

    made: list[Any] = []
    error = said(lambda: made.append(EngineArgs(**case["args"]).create_engine_config()))
    platform = type(vllm.platforms.current_platform)
    problems = []
    if made and case["eplb"]:
        made[0].parallel_config.enable_eplb = True
        problems = platform.v41_problems(made[0])
    assert "DeepseekV41ForCausalLM" in ModelRegistry.models
    kernel = ""
    if case["kernels"]:
        from deepinfer_vllm.models.deepseek_v41 import mhc

        platform.register_triton_kernel_overrides()
        kernel = getattr(mhc.delayed, "func", mhc.delayed).__module__
    return {
        "error": error,
        "platform": qualified(platform),
        "config": platform.reached,
        "problems": problems,
        "arch": said(lambda: platform.verify_model_arch("DeepseekV41ForCausalLM")),
        "hash": made[0].compute_hash() if made else "",
        "kernel": kernel,
    }


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    json.dump([in_a_fork(configure, case) for case in json.load(sys.stdin)], output)
    output.close()
