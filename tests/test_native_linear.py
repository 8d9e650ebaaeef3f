"""The compiled product of few rows against torch's."""

from __future__ import annotations

import pytest
import torch

from deepinfer_vllm.native import linear as module
from deepinfer_vllm.native.build import kernels
from deepinfer_vllm.native.linear import FEW_ROWS, linear
from small_model import normal


@pytest.mark.parametrize("rows", range(1, FEW_ROWS + 1))
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 31), (7, 32), (24, 100), (300, 513)])
@pytest.mark.parametrize("threads", [1, 2])
def test_as_torch(rows: int, outputs: int, inputs: int, threads: int) -> None:
    """Widths with and without a remainder, matrices for one thread and for several."""
    assert kernels() is not None, "these tests need a C compiler"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = normal(1, rows, inputs), normal(2, outputs, inputs)
        got = linear(x, weight)
    finally:
        torch.set_num_threads(before)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6 * inputs)


def test_rows_of_a_wider_array() -> None:
    x, weight = normal(1, 3, 2, 40)[:, 1], normal(2, 6, 9, 40)[4]
    torch.testing.assert_close(linear(x, weight), x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (normal(1, 0, 8), normal(2, 5, 8)),
        (normal(1, FEW_ROWS + 1, 8), normal(2, 5, 8)),
        (normal(1, 2, 3, 8), normal(2, 5, 8)),
        (normal(1, 2, 8), normal(2, 8, 5).T),
        (normal(1, 2, 8).double(), normal(2, 5, 8).double()),
        (normal(1, 2, 8).bfloat16(), normal(2, 5, 8).bfloat16()),
    ],
    ids=["no rows", "many rows", "more dimensions", "a transposed weight", "float64", "bfloat16"],
)
def test_what_is_left_to_torch(x: torch.Tensor, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernels", lambda: pytest.fail("compiled"))
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


def test_widths_that_differ_are_refused() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(normal(1, 2, 8), normal(2, 5, 9))
