"""The portable operations that the kernels stand in for, against loops in float64: what either is measured by."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from tiles.cases import ATTENTION, MASKS, AttentionCase, MaskCase  # noqa: E402
from tiles.check import Check, checks, relative  # noqa: E402
from tiles.shapes import SHAPES  # noqa: E402

CHECKS = list(checks())


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: f"{c.kernel} {c.case} {c.dtype}")
def test_the_portable_operation_is_that_of_the_loops(check: Check) -> None:
    assert relative(check.portable(), check.loops()) <= check.error


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_a_token_without_rows_gets_zero_and_what_nobody_reads_is_nan(case: AttentionCase) -> None:
    query, window, selected, sink = case.inputs(torch.float32)
    parts = [window] if selected is None else [window, selected]
    assert any(rows.isnan().any() for rows, _ in parts)
    (check,) = (c for c in CHECKS if c.case == case and c.dtype == torch.float32)
    (out,) = check.portable()
    assert out.isfinite().all()
    if case.tokens > 1:
        assert all((slots[1] < 0).all() for _, slots in parts)
        assert torch.equal(out[1], torch.zeros(case.heads, case.dim))


@pytest.mark.parametrize("case", [case for case in MASKS if case.candidates and case.tokens > 1], ids=str)
def test_masks_keep_what_is_admitted_and_nothing_else(case: MaskCase) -> None:
    (check,) = (c for c in CHECKS if c.case == case)
    (masked,) = check.portable()
    scores, visible, candidates = case.inputs()
    assert candidates is not None
    assert torch.equal(masked[0, : visible[0]], scores[0, : visible[0]])  # no candidates: every block
    assert torch.equal(masked[masked > -torch.inf], scores[masked > -torch.inf])
    kept = (masked[1] > -torch.inf).nonzero().flatten()
    assert {int(g) // case.block_size for g in kept} <= {int(b) for b in candidates[1]}
    assert (kept < visible[1]).all()


def test_a_wrong_infinity_and_a_wrong_shape_are_no_small_error() -> None:
    one = torch.tensor([1.0, -torch.inf])
    assert relative((one,), (one,)) == 0
    assert relative((torch.tensor([1.0, 0.0]),), (one,)) == float("inf")
    assert relative((torch.tensor([torch.nan, -torch.inf]),), (one,)) == float("inf")
    assert relative((one[:1],), (one,)) == float("inf")
    assert relative((torch.tensor([1.5, -torch.inf]),), (one,)) == 0.5


def test_the_record_is_of_these_shapes_and_these_cases(root: Path) -> None:
    """What `make ascend-kernels` left: everything was emitted, and everything was right."""
    record = json.loads((root / "benchmarks/results/ascend_tilelang.json").read_text())
    shapes = {name: json.loads(json.dumps(arguments)) for name, (_, arguments) in SHAPES.items()}
    assert {name: row["arguments"] for name, row in record["emitted"].items()} == shapes
    assert all(row["lines"] > 50 and row["vector functions"] for row in record["emitted"].values())
    wanted = [(check.kernel, asdict(check.case), str(check.dtype).removeprefix("torch.")) for check in CHECKS]
    assert [(row["kernel"], row["case"], row["dtype"]) for row in record["run"]] == wanted
    assert all(
        row["right"] and max(row["error"], row["error_beside_portable"]) <= row["bound"] for row in record["run"]
    )
