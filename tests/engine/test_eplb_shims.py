"""The shims that let EPLB run on a CPU stay out of the tests that run after theirs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from engine import cpu_eplb


def test_nothing_is_left_of_them(tmp_path: Path) -> None:
    parallel = importlib.import_module("vllm.config.parallel")
    balancer = importlib.import_module("deepinfer_vllm.eplb.balancer")
    states = [importlib.import_module(f"vllm.distributed.eplb.{name}") for name in ("eplb_state", "async_worker")]
    runner = importlib.import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner

    def found() -> list[object]:
        loop = states[0].EplbState.start_async_loop
        torches = [state.torch for state in states]
        return [parallel.current_platform, balancer.LB_STEPS, loop, runner.load_model, list(sys.meta_path), *torches]

    before = found()
    with cpu_eplb.eplb_on_cpu(tmp_path):
        cpu_eplb.install()  # as vLLM does when it loads it as a plugin
        cpu_eplb.after_import("module_that_nobody_imports", cpu_eplb._shorten_windows)
        during = found()
    assert all(a is not b and a != b for a, b in zip(before, during, strict=True))
    after = found()
    assert after == before and all(a is b for a, b in zip(before[2:4], after[2:4], strict=True))
