"""Published quantised tensors made plain, against the reference's own expansion."""

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.engram_table import EngramTable
from deepinfer_vllm.models.deepseek_v41.widen import power_of_two, widen, widened
from reference.dequantise import dequantise
from small_model import generator, normal


def random_bytes(seed: int, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator(seed)).to(torch.uint8)


def scales(seed: int, *shape: int) -> torch.Tensor:
    return random_bytes(seed, *shape, low=110, high=140)


CASES = {
    "e4m3 in blocks": (normal(1, 96, 64).to(torch.float8_e4m3fn), scales(2, 3, 2)),
    "e4m3 in blocks, the last ones short": (normal(3, 70, 40).to(torch.float8_e4m3fn), scales(4, 3, 2)),
    "e4m3 by row": (normal(5, 7, 64).to(torch.float8_e4m3fn), scales(6, 7, 2)),
    "packed e2m1": (random_bytes(7, 9, 32), scales(8, 9, 2)),
    "packed e2m1 as signed bytes": (random_bytes(9, 9, 32).view(torch.int8), scales(10, 9, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_as_the_reference(case: str) -> None:
    weight, scale = CASES[case]
    expected = dequantise({"x.weight": weight, "x.scale": scale})["x.weight"]
    assert torch.equal(widen(weight, scale), expected) and bool(expected.any())


def test_every_e2m1_code_low_nibble_first() -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | (15 - codes) << 4).unsqueeze(0)
    got = widen(packed, torch.full((1, 1), 128, dtype=torch.uint8))[0].view(16, 2)
    every = [*values, *(-v for v in values)]
    assert got[:, 0].tolist() == [2 * v for v in every] and got[:, 1].tolist() == [2 * v for v in reversed(every)]


def test_scales_are_powers_of_two() -> None:
    got = power_of_two(torch.arange(1, 255).to(torch.uint8))
    assert got.double().tolist() == [2.0 ** (byte - 127) for byte in range(1, 255)]


def test_a_scale_that_does_not_cover_its_weight() -> None:
    with pytest.raises(ValueError, match=r"scale \[2, 2\] does not cover weight \[96, 64\] in blocks of 32"):
        widen(torch.zeros(96, 64).to(torch.float8_e4m3fn), scales(1, 2, 2))


@pytest.mark.parametrize("scale_first", [True, False])
def test_weights_find_their_scales(scale_first: bool) -> None:
    (one, one_scale), (two, two_scale) = CASES["e4m3 by row"], CASES["packed e2m1"]
    stream = [("a.weight", one), ("b.weight", two), ("c.weight", torch.ones(3)), ("b.scale", two_scale)]
    stream += [("d.hc_attn_scale", torch.ones(3)), ("a.scale", one_scale)]
    got = dict(widened(reversed(stream) if scale_first else stream))
    assert set(got) == {"a.weight", "b.weight", "c.weight", "d.hc_attn_scale"}
    assert torch.equal(got["a.weight"], widen(one, one_scale)) and torch.equal(got["b.weight"], widen(two, two_scale))
    assert torch.equal(got["c.weight"], torch.ones(3))


def test_what_stays_alone_is_named() -> None:
    weight, scale = CASES["packed e2m1"]
    assert [name for name, _ in widened([("a.scale", scale), ("b.weight", weight)])] == [
        "a.scale",
        "b.weight (without its scale)",
    ]


def test_table_rows_are_widened_as_they_are_read() -> None:
    weight, scale = normal(11, 40, 64).to(torch.float8_e4m3fn), scales(12, 40, 2)
    expected = dequantise({"x.weight": weight, "x.scale": scale})["x.weight"]
    ids = torch.randint(40, (5, 3), generator=generator(13))
    assert torch.equal(EngramTable(weight, scale).gather(ids), expected[ids])
    assert torch.equal(EngramTable(expected).gather(ids), expected[ids])
