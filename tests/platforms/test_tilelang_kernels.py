"""The kernels on a CPU, and what is emitted for the released model. Needs TileLang: `make ascend-kernels`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("tilelang.ascend", reason="TileLang with an Ascend backend is installed by `make ascend-kernels`")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from tiles.cases import ATTENTION  # noqa: E402
from tiles.check import Check, checks  # noqa: E402
from tiles.shapes import SHAPES  # noqa: E402

from deepinfer_vllm.platforms.tilelang import sparse_attention  # noqa: E402
from deepinfer_vllm.platforms.tilelang.dialect import C  # noqa: E402
from deepinfer_vllm.platforms.tilelang.launch import emitted  # noqa: E402


@pytest.mark.parametrize("check", list(checks()), ids=lambda c: f"{c.kernel} {c.case} {c.dtype}")
def test_the_kernel_is_that_of_the_loops_and_of_the_portable_operation(check: Check) -> None:
    loops, portable = check.errors()
    assert loops <= check.error
    assert portable <= check.error


def test_heads_that_fill_up_a_tile_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sparse_attention.HEADS, C, 4)
    (check,) = (c for c in checks() if c.case == ATTENTION[2])
    assert check.case.heads == 3
    assert max(check.errors()) <= check.error


@pytest.mark.parametrize("name", SHAPES)
def test_ascendc_is_emitted(name: str) -> None:
    """One kernel with SIMT code; that of those with products runs on a cube core and two vector cores."""
    build, arguments = SHAPES[name]
    source = emitted(build, *arguments)
    assert len(re.findall(r"__global__", source)) == 1 and "asc_vf_call<" in source
    products = build.__module__.rpartition(".")[2] in {"sparse_attention", "delayed_mhc"}
    assert products == ("__mix__(1, 2)" in source) == ("ascend_gemm_l1<" in source)
