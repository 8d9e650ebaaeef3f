"""vLLM on a device that is not the host: an emulated one, in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_vllm.checkpoint.backends import EngineBackend
from engine.llama import write_llama
from npu.inside import run_cases, run_inside

PROMPTS = [[5, 9, 200, 7] * 20, [31, 30, 29]]
COUNT = 24


def test_the_device(tmp_path: Path) -> None:
    """It is as strict as one that is there; else what follows would say nothing."""
    run_inside(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/npu/device_cases.py")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny llama, prompts for it, and what vLLM answers to them on the CPU."""
    directory = write_llama(tmp_path_factory.mktemp("model") / "llama")
    backend = EngineBackend(directory, "float32", "plain", kv_cache_memory_bytes=32 << 20)
    try:
        answers = [answer.ids for answer in backend.generate_many(PROMPTS, COUNT, logits=False)]
    finally:
        backend.close()
    assert all(len({*answer}) > 3 for answer in answers)
    return {"LLAMA": str(directory), "ASKED": json.dumps({"prompts": PROMPTS, "answers": answers})}


@pytest.mark.vllm
def test_engines(tmp_path: Path, llama: dict[str, str]) -> None:
    """A llama, V4.1 with images, its store and DSpark: all on the device, with the answers of the CPU."""
    run_cases(tmp_path, "worker_cases.py", "engine_cases.py", **llama)


@pytest.mark.vllm
def test_a_platform_that_is_a_cpu_of_another_name(tmp_path: Path, llama: dict[str, str]) -> None:
    """Out of the tree, yet vLLM's own worker."""
    plugins = {"vllm.platform_plugins": "npu.cpu_platform:platform"}
    said = run_inside(tmp_path, "-m", "npu.cpu_platform", plugins=plugins, **llama)
    assert said.splitlines()[-1] == "npu.cpu_platform.OtherCpuPlatform answers as the CPU"
