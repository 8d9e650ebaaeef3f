"""Our Triton kernels beside the PyTorch code that they stand for, and whether they compile for NVIDIA chips."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.gather_attention import gather_attention
from deepinfer_vllm.models.deepseek_v41.mhc import mixed
from deepinfer_vllm.triton_kernels.choice import chosen
from kernels.triton_ops import SOME, attention_cases, gate_cases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs Triton; xgrammar, which vLLM requires, brings it on Linux x86-64",
)
SHARED = {80: 163 << 10, 90: 227 << 10}
"""Bytes of a multiprocessor that a program may take (CUDA C++ programming guide, compute capabilities)."""


def call(module: str, argument: Path, **environment: str) -> str:
    tests = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", f"kernels.{module}", str(argument)]
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the kernels gave, by case."""
    file = tmp_path_factory.mktemp("triton") / "results.pt"
    call("triton_ops", file)
    results: dict[str, Any] = torch.load(file)
    return results


def gathered(case: dict[str, Any]) -> torch.Tensor:
    """The reference, over copies of the rows."""
    parts = [case["window"], *([case["selected"]] if case["selected"] else [])]
    rows = torch.cat([torch.where((s >= 0).unsqueeze(-1), r[s.clamp_min(0)].float(), 0.0) for r, s in parts], dim=1)
    valid = torch.cat([slots >= 0 for _, slots in parts], dim=1)
    return gather_attention(case["query"].float(), rows, valid, case["sink"], case["scale"])


@pytest.mark.parametrize("name", attention_cases())
def test_attention_over_rows_in_place(name: str, found: dict[str, Any]) -> None:
    torch.testing.assert_close(found[name], gathered(attention_cases()[name]), rtol=1e-5, atol=2e-6)
    assert not found[name][0].any(), "a token that sees nothing gives all its weight to the sink"


def test_other_tokens_change_no_bit(found: dict[str, Any]) -> None:
    assert torch.equal(found["alone"][0], found[SOME][3])


def test_nothing_of_nothing(found: dict[str, Any]) -> None:
    assert found["nothing"].shape == (0, 20, 24)


@pytest.mark.parametrize("name", gate_cases())
def test_gates(name: str, found: dict[str, Any]) -> None:
    case = gate_cases()[name]
    sizes = (case[part] for part in ("streams", "width", "iterations", "eps", "norm_eps"))
    wanted = mixed(*(case[part] for part in ("mixes", "norm", "base", "scale")), *sizes)
    for got, want in zip(found[name], wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_they_compile_for_ampere_and_hopper(tmp_path: Path) -> None:
    """Products on the matrix units, next to nothing spilt, and within what a multiprocessor has."""
    used = json.loads(call("triton_compile", tmp_path, TRITON_CACHE_DIR=str(tmp_path / "cache"), TRITON_INTERPRET="0"))
    assert len(used) == 3 * len(SHARED)
    for name, each in used.items():
        assert each["shared"] <= SHARED[int(name[-2:])] and each["LOCAL"] == 0, (name, each)
        assert each["STACK"] <= (128 if "of 64" in name else 0), (name, each)
        assert each["REG"] * each["warps"] * 32 <= 65536 and bool(each["products"]) == name.startswith("attention")


def test_a_model_with_them_is_the_model(found: dict[str, Any]) -> None:
    """Windows, selected rows, chunks and single tokens, in every layer."""
    fused, plain = found["model, triton"], found["model, torch"]
    assert torch.equal(fused["tokens"], plain["tokens"])
    for name in ("prompt", "pre", "answer"):
        torch.testing.assert_close(fused[name], plain[name], rtol=1e-4, atol=1e-4)
    assert not torch.equal(fused["prompt"], plain["prompt"]), "the kernels were not asked"


def test_it_says_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_KERNELS", "triton")
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    with pytest.raises(ValueError, match="DEEPINFER_VLLM_KERNELS=triton needs Triton .* set it to torch"):
        chosen()
    monkeypatch.setenv("DEEPINFER_VLLM_KERNELS", "torch")
    assert not chosen()
