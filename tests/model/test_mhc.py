"""Hyper-connections: mixing weights, collapse and expand."""

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.mhc import HyperConnection, collapse, expand, sinkhorn, sinkhorn_in_torch
from deepinfer_vllm.native.build import kernels
from reference import mhc as reference
from small_model import both_configs, fill, normal


@pytest.mark.parametrize("size", [1.0, 1e-4])
@pytest.mark.parametrize("eps", [1e-6, 0.05])
@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("streams", [2, 4])
def test_mixes_are_those_of_the_reference(streams: int, iterations: int, eps: float, size: float) -> None:
    _, config = both_configs(hc_mult=streams, hc_sinkhorn_iters=iterations, hc_eps=eps)
    module = HyperConnection(streams, 32, iterations, eps, config.rms_norm_eps)
    weights = fill(module, seed=streams + iterations)
    x = normal(1, 11, streams, 32) * size  # at 1e-4 the norm's epsilon counts
    expected = reference.mixes(x.double(), weights["fn"], weights["base"], weights["scale"], config)
    for got, want in zip(module(x), expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)


def test_streams_of_less_precision_are_mixed_in_float32() -> None:
    module = HyperConnection(4, 32, 20, 1e-6, 1e-6)
    fill(module, seed=3)
    x = normal(2, 5, 4, 32).bfloat16()
    for got, want in zip(module(x), module(x.float()), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, want)


def normalise_columns(m: list[list[float]], eps: float) -> list[list[float]]:
    return [[value / (sum(other[j] for other in m) + eps) for j, value in enumerate(row)] for row in m]


def normalise_rows(m: list[list[float]], eps: float) -> list[list[float]]:
    return [[value / (sum(row) + eps) for value in row] for row in m]


@pytest.mark.parametrize("iterations", [1, 2, 3, 20])
def test_sinkhorn_rounds(iterations: int) -> None:
    """Rows by softmax, then columns; each further round rows and columns."""
    logits, eps = normal(3, 6, 3, 3) * 2, 1e-3
    for got, matrix in zip(sinkhorn(logits, iterations, eps), logits.double(), strict=True):
        m = normalise_columns([[float(v) for v in row.exp() / row.exp().sum() + eps] for row in matrix], eps)
        for _ in range(iterations - 1):
            m = normalise_columns(normalise_rows(m, eps), eps)
        torch.testing.assert_close(got.double(), torch.tensor(m).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 1, 300])
@pytest.mark.parametrize("iterations", [1, 20])
@pytest.mark.parametrize("streams", [1, 2, 4, 7])
@pytest.mark.parametrize("size", [1.0, 40.0])
def test_compiled_sinkhorn_is_that_of_torch(tokens: int, iterations: int, streams: int, size: float) -> None:
    """Also where a row's softmax is one and noughts, and from a part of a larger array."""
    assert kernels() is not None, "these tests need a C compiler"
    logits = normal(12, tokens, streams, 2 * streams)[..., ::2] * size
    got = sinkhorn(logits, iterations, 1e-6)
    torch.testing.assert_close(got, sinkhorn_in_torch(logits, iterations, 1e-6), rtol=2e-5, atol=1e-7)


def test_each_sinkhorn_round_counts() -> None:
    logits = normal(4, 6, 4, 4) * 3
    results = [sinkhorn(logits, n, 1e-6) for n in (1, 2, 3, 20)]
    for one, other in zip(results, results[1:], strict=False):
        assert float((one - other).abs().max()) > 1e-4
    assert float((results[-1].sum(-2) - 1).abs().max()) < 1e-4
    assert float((results[-1].sum(-1) - 1).abs().max()) < float((results[0].sum(-1) - 1).abs().max())


def test_collapse() -> None:
    streams, pre = normal(5, 7, 4, 16), normal(6, 7, 4)
    got = collapse(streams, pre)
    for t in range(7):
        expected = sum(pre[t, i].double() * streams[t, i].double() for i in range(4))
        torch.testing.assert_close(got[t].double(), expected, rtol=1e-5, atol=1e-6)


def test_expand_sums_over_the_first_index_of_comb() -> None:
    y, streams, post, comb = normal(7, 5, 16), normal(8, 5, 3, 16), normal(9, 5, 3), normal(10, 5, 3, 3)
    got = expand(y, streams, post, comb)
    for t in range(5):
        for j in range(3):
            expected = post[t, j].double() * y[t].double()
            for i in range(3):
                expected = expected + comb[t, i, j].double() * streams[t, i].double()
            torch.testing.assert_close(got[t, j].double(), expected, rtol=1e-5, atol=1e-5)


def test_results_are_rounded_once_to_the_streams_dtype() -> None:
    y, streams, post, comb = normal(7, 5, 16), normal(8, 5, 3, 16), normal(9, 5, 3), normal(10, 5, 3, 3)
    y, streams = y.bfloat16(), streams.bfloat16()
    assert torch.equal(collapse(streams, post), collapse(streams.float(), post).bfloat16())
    assert torch.equal(expand(y, streams, post, comb), expand(y.float(), streams.float(), post, comb).bfloat16())
