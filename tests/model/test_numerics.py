"""Fake quantisation: each value to the nearest that its record can hold, found here by trying all of them."""

import math
from collections.abc import Callable

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.numerics import Numerics, power_of_two_scale, round_e2m1
from reference import fake_quant
from small_model import generator, normal

QAT, PLAIN = Numerics(quantised=True), Numerics(quantised=False)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()  # code 127 is NaN
KINDS = {
    "window": (QAT.window, fake_quant.window_kv, 32),
    "compressed": (QAT.compressed, fake_quant.compressed_kv, 16),
    "index": (QAT.index, fake_quant.indexer, 32),
}
Rounding = Callable[[torch.Tensor], torch.Tensor]


def nearest(value: float, grid: list[float]) -> float:
    """The nearest entry with the value's sign; of two equally near, the one of even code."""
    distances = [abs(abs(value) - entry) for entry in grid]
    best = min(distances)
    codes = [code for code, distance in enumerate(distances) if distance == best]
    code = codes[0] if len(codes) == 1 else next(c for c in codes if c % 2 == 0)
    return math.copysign(grid[code], value)


def power(amax: float, largest: float) -> float:
    """The least power of two that brings amax to `largest` or below."""
    exponent = -200
    while amax / 2.0**exponent > largest:
        exponent += 1
    return 2.0**exponent


def by_hand(kind: str, block: list[float]) -> list[float]:
    amax = max(abs(v) for v in block)
    if kind == "window":
        scale, grid = power(max(amax, 1e-4), 448), E4M3
    elif kind == "index":
        scale, grid = power(max(amax, 6 * 2.0**-126), 6), E2M1
    else:
        amax32 = torch.tensor(max(amax, 6 * 2.0**-9)).float()
        scale, grid = nearest(float(amax32 / 6), E4M3), E2M1
    return [nearest(float(torch.tensor(v) / scale), grid) * scale for v in block]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-30, 1e-5, 0.01, 1.0, 300.0, 2000.0])
def test_every_value_goes_to_its_nearest(kind: str, size: float) -> None:
    ours, theirs, width = KINDS[kind]
    x = normal(1, 6, 3 * width) * size
    x[0, :width] = 0
    got = ours(x)
    expected = [by_hand(kind, block.tolist()) for block in x.view(-1, width)]
    assert torch.equal(got.view(-1, width), torch.tensor(expected))
    assert torch.equal(got, theirs(x))
    assert not bool(got[0, :width].any())


@pytest.mark.parametrize("kind", KINDS)
def test_ties_and_exact_values(kind: str) -> None:
    """Halfway values, grid values, and a block whose largest is a power of two times the grid's largest."""
    ours, theirs, width = KINDS[kind]
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, *E2M1]
    x = torch.tensor(halves + [-v for v in halves])[:width] * torch.tensor([[1.0], [64.0], [2.0**-8]])
    got = ours(x)
    expected = [by_hand(kind, row) for row in x.tolist()]
    assert torch.equal(got, torch.tensor(expected)) and torch.equal(got, theirs(x))


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_scale_at_powers_of_two(largest: float) -> None:
    amax = torch.ldexp(torch.full((60,), largest), torch.arange(-30, 30))
    assert torch.equal(power_of_two_scale(amax, largest), torch.ldexp(torch.ones(60), torch.arange(-30, 30)))
    above = torch.nextafter(amax, torch.tensor(torch.inf))
    assert torch.equal(power_of_two_scale(above, largest), torch.ldexp(torch.ones(60), torch.arange(-29, 31)))


def test_e2m1_of_a_fine_grid() -> None:
    x = torch.arange(-8, 8, 1 / 64)
    assert torch.equal(round_e2m1(x), torch.tensor([nearest(v, E2M1) for v in x.tolist()]))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_rounded_apart(kind: str) -> None:
    ours, _, width = KINDS[kind]
    x = normal(2, 4, 2 * width)
    x[:, width:] *= 1000
    got = ours(x)
    assert torch.equal(got[:, :width], ours(x[:, :width])) and torch.equal(got[:, width:], ours(x[:, width:]))
    assert not torch.equal(got, x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_width_of_no_whole_blocks_is_left_alone(kind: str) -> None:
    ours, theirs, width = KINDS[kind]
    x = normal(3, 4, width + 8)
    assert torch.equal(ours(x), x) and torch.equal(theirs(x), x)


@pytest.mark.parametrize("kind", KINDS)
def test_less_precision_and_more_dimensions(kind: str) -> None:
    ours, _, width = KINDS[kind]
    x = normal(4, 3, 5, 2 * width).bfloat16()
    got = ours(x)
    assert got.dtype == torch.bfloat16 and got.shape == x.shape
    assert torch.equal(got, ours(x.float()).bfloat16())


@pytest.mark.parametrize("kind", ["window", "index"])  # a scale that is itself rounded may move
def test_rounding_twice_changes_nothing(kind: str) -> None:
    ours: Rounding = KINDS[kind][0]
    once = ours(torch.rand(8, 64, generator=generator(5)) * 4 - 2)
    assert torch.equal(ours(once), once)


def test_plain_is_the_identity() -> None:
    x = normal(6, 4, 64) * 1e3
    assert all(f(x) is x for f in (PLAIN.window, PLAIN.compressed, PLAIN.index))
