"""Rotary embedding: frequencies, rotation, and what it leaves alone."""

import math

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.config import RopeConfig
from deepinfer_vllm.models.deepseek_v41.rope import RotaryTable, inverse_frequencies, rotate
from reference import rope as reference
from small_model import both_configs, normal

PLAIN = RopeConfig(dim=8, theta=1e4)
YARN = RopeConfig(dim=16, theta=1.6e5, factor=16, original_max_positions=64)


@pytest.mark.parametrize("original", [64, 128, 65536])
@pytest.mark.parametrize("factor", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("dim", [8, 16, 64])
def test_frequencies_are_those_of_the_reference(dim: int, factor: float, original: int) -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original,
    }
    ours, theirs = both_configs(qk_rope_head_dim=dim, rope_scaling=scaling, compress_rope_theta=160000)
    for ratio, rope in ((0, ours.main_rope), (1, ours.compress_rope), (2, ours.compress_rope)):
        expected = reference.frequencies(theirs, ratio)
        torch.testing.assert_close(inverse_frequencies(rope).double(), expected, rtol=1e-6, atol=0)


def test_yarn_slows_the_slow_pairs_alone() -> None:
    exponents = torch.arange(0, 64, 2).double() / 64
    plain = 160000.0**-exponents
    yarn = inverse_frequencies(RopeConfig(64, 160000, 16, 65536)).double()
    ratio = yarn / plain
    assert torch.allclose(ratio[:1], torch.ones(1).double()) and torch.allclose(ratio[-1:], ratio.new_tensor([1 / 16]))
    assert bool((ratio.diff() <= 1e-6).all()) and ratio.unique().numel() > 4


@pytest.mark.parametrize("rope", [PLAIN, YARN])
@pytest.mark.parametrize("heads", [None, 3])
def test_rotation_of_each_pair(rope: RopeConfig, heads: int | None) -> None:
    positions = torch.tensor([0, 1, 2, 63, 64, 977])
    x = normal(1, 6, 24) if heads is None else normal(1, 6, heads, 24)
    frequencies = inverse_frequencies(rope)
    got = rotate(x, RotaryTable(positions, frequencies))
    expected = x.double().clone()
    for t, position in enumerate(positions.tolist()):
        for pair, frequency in enumerate(frequencies.tolist()):
            angle = position * frequency
            even, odd = 24 - rope.dim + 2 * pair, 24 - rope.dim + 2 * pair + 1
            a, b = x[t, ..., even].double(), x[t, ..., odd].double()
            expected[t, ..., even] = a * math.cos(angle) - b * math.sin(angle)
            expected[t, ..., odd] = a * math.sin(angle) + b * math.cos(angle)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-4)
    torch.testing.assert_close(got[:3].double(), expected[:3], rtol=0, atol=2e-6)


def test_only_the_last_channels_change() -> None:
    x = normal(2, 5, 3, 24)
    got = rotate(x, RotaryTable(torch.arange(5) + 1, inverse_frequencies(PLAIN)))
    assert torch.equal(got[..., :16], x[..., :16])
    assert bool((got[..., 16:] != x[..., 16:]).all())


def test_every_channel_may_rotate() -> None:
    x = normal(3, 4, 8)
    positions, frequencies = torch.arange(4) * 7, inverse_frequencies(PLAIN)
    expected = reference.rotate(x.double(), positions, frequencies.double())
    torch.testing.assert_close(rotate(x, RotaryTable(positions, frequencies)).double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("rope", [PLAIN, YARN])
def test_inverse_undoes(rope: RopeConfig) -> None:
    x = normal(4, 9, 2, 20)
    table = RotaryTable(torch.arange(9) * 123_457, inverse_frequencies(rope))
    turned = rotate(x, table)
    torch.testing.assert_close(rotate(turned, table, inverse=True), x, rtol=0, atol=2e-6)
    assert not torch.allclose(rotate(turned, table), x, atol=0.1)


def test_a_million_positions() -> None:
    """Angles are float32 products, as in the implementations the weights were made with: exact for the first pair,
    and off by no more than two roundings for the others."""
    positions = torch.tensor([999_999, 1_048_575])
    frequencies = inverse_frequencies(YARN)
    table = RotaryTable(positions, frequencies)
    exact = positions.double().unsqueeze(-1) * frequencies.double()
    bound = exact * 2.0**-24 + 2e-7
    for cos, sin, sign in ((table.cos[:, ::2], table.sin[:, ::2], -1), (table.cos[:, 1::2], table.sin[:, 1::2], 1)):
        assert bool(((cos.double() - exact.cos()).abs() <= bound).all())
        assert bool(((sign * sin.double() - exact.sin()).abs() <= bound).all())
        assert bool(((cos.double() - exact.cos()).abs()[:, 0] < 2e-7).all())


def test_rotation_is_computed_in_float32() -> None:
    x = normal(5, 6, 16).bfloat16()
    table = RotaryTable(torch.arange(6) + 500, inverse_frequencies(PLAIN))
    got = rotate(x, table)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(x.float(), table).bfloat16())
