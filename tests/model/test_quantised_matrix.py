"""Published quantised tensors and their values, against the reference's own expansion."""

from __future__ import annotations

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41 import quantised_matrix
from deepinfer_vllm.models.deepseek_v41.engram_table import EngramTable
from deepinfer_vllm.models.deepseek_v41.quantised_matrix import E4M3, QuantisedMatrix, Widener
from deepinfer_vllm.models.deepseek_v41.quantised_stream import joined
from reference.dequantise import dequantise
from small_model import generator

Pair = tuple[torch.Tensor, torch.Tensor]


def random_bytes(seed: int, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator(seed)).to(torch.uint8)


def scales(seed: int, *shape: int) -> torch.Tensor:
    return random_bytes(seed, *shape, low=110, high=140)


def e4m3(seed: int, *shape: int) -> torch.Tensor:
    """Every code but NaN, both signs."""
    codes = random_bytes(seed, *shape)
    return torch.where((codes & 0x7F) == 0x7F, 0, codes).view(E4M3)


CASES = {
    "e4m3 in blocks": (e4m3(1, 96, 64), scales(2, 3, 2)),
    "e4m3 in blocks, the last ones short": (e4m3(3, 70, 40), scales(4, 3, 2)),
    "e4m3 narrower than a block": (e4m3(3, 3, 5), scales(4, 1, 1)),
    "e4m3 by row": (e4m3(5, 7, 64), scales(6, 7, 2)),
    "e4m3 by row, the last block short": (e4m3(5, 7, 72), scales(6, 7, 3)),
    "packed e2m1": (random_bytes(7, 9, 32), scales(8, 9, 2)),
    "packed e2m1, the last block short": (random_bytes(7, 9, 37), scales(8, 9, 3)),
    "packed e2m1 in blocks": (random_bytes(7, 40, 32), scales(8, 2, 2)),
    "packed e2m1 as signed bytes": (random_bytes(9, 9, 32).view(torch.int8), scales(10, 9, 2)),
}


def expected(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantise({"x.weight": weight, "x.scale": scale})["x.weight"]


@pytest.mark.parametrize("case", CASES)
def test_as_the_reference(case: str) -> None:
    matrix = QuantisedMatrix.published(*CASES[case])
    values = expected(*CASES[case])
    assert matrix.shape == values.shape
    assert torch.equal(matrix.widen(), values) and bool(values.any())
    assert torch.equal(matrix.widen(torch.bfloat16), values.bfloat16())
    assert torch.equal(matrix.widen(torch.bfloat16).float(), values)


@pytest.mark.parametrize("case", CASES)
def test_a_few_rows_at_a_time(case: str) -> None:
    """Buffers smaller than the matrix, and than one row of it."""
    matrix, values = QuantisedMatrix.published(*CASES[case]), expected(*CASES[case])
    for size in (1, 2 * values.shape[1], 3 * values.shape[1] + 1):
        widener = Widener(size)
        parts = widener.parts(matrix)
        assert len(parts) == -(-values.shape[0] // max(1, size // values.shape[1]))
        assert torch.equal(torch.cat([widener(matrix.rows(part)).clone() for part in parts]), values)
        assert widener._values.numel() == max(size, values.shape[1])


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_columns(case: str) -> None:
    matrix, values = QuantisedMatrix.published(*CASES[case]), expected(*CASES[case])
    end = values.shape[1]
    for part in (slice(0, min(32, end)), slice(32, end)) if end > 32 else (slice(0, end),):
        assert torch.equal(matrix.columns(part).widen(), values[:, part])
    if end > 32:
        with pytest.raises(ValueError, match=f"columns 16 to {end} cut a block of 32"):
            matrix.columns(slice(16, end))


def test_every_e4m3_code_under_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(247, 1)
    scale = torch.arange(247, dtype=torch.uint8).unsqueeze(1).repeat(1, 8)
    values = codes.view(E4M3).double() * 2.0 ** (scale[:, :1].double() - 127)
    got = QuantisedMatrix.published(codes.view(E4M3), scale).widen()
    assert torch.equal(got.double(), values) and bool(got.isfinite().all())


def test_every_e2m1_code_low_nibble_first() -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | (15 - codes) << 4).unsqueeze(0)
    got = QuantisedMatrix.published(packed, torch.full((1, 1), 128, dtype=torch.uint8)).widen()[0].view(16, 2)
    every = [*values, *(-v for v in values)]
    assert got[:, 0].tolist() == [2 * v for v in every] and got[:, 1].tolist() == [2 * v for v in reversed(every)]
    assert torch.copysign(torch.ones(2), got[8]).tolist() == [-1, 1]  # minus zero


def test_whatever_the_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads a model with its dtype as torch's default."""
    monkeypatch.setattr(quantised_matrix, "_PAIRS", {})
    torch.set_default_dtype(torch.bfloat16)
    try:
        widened = {case: QuantisedMatrix.published(*pair).widen() for case, pair in CASES.items()}
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(widened[case], expected(*CASES[case])) for case in CASES)


def test_inside_and_outside_of_inference_mode() -> None:
    weight, scale = CASES["packed e2m1"]
    matrix, widener = QuantisedMatrix.published(weight, scale), Widener()
    quantised_matrix._PAIRS.clear()
    with torch.inference_mode():
        inside = widener(matrix).clone()
    assert torch.equal(widener(matrix), inside)


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (e4m3(1, 96, 64), scales(1, 2, 2), r"scale \[2, 2\] does not cover weight \[96, 64\] in blocks of 32"),
        (e4m3(1, 96, 64), scales(1, 3, 1), r"scale \[3, 1\] does not cover"),
        (e4m3(1, 96, 64), scales(1, 3, 2).float(), "scale of torch.float32: must be a matrix and ue8m0"),
        (e4m3(1, 64), scales(1, 2), r"weight \[64\] with a scale"),
        (random_bytes(1, 4, 16), scales(1, 4, 2), r"does not cover weight \[4, 32\]"),
        (e4m3(1, 4, 32), torch.full((4, 1), 255, dtype=torch.uint8), "scale byte 255: NaN"),
        (e4m3(1, 4, 32), torch.full((4, 1), 247, dtype=torch.uint8), r"scale byte 247: 2 \*\* 120 is too large"),
        (torch.full((4, 32), 0xFF, dtype=torch.uint8).view(E4M3), scales(1, 4, 1), "weight holds e4m3 NaN"),
        (torch.full((4, 32), 0x7F, dtype=torch.uint8).view(E4M3), scales(1, 4, 1), "weight holds e4m3 NaN"),
    ],
)
def test_what_cannot_be_read_is_refused(weight: torch.Tensor, scale: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantisedMatrix.published(weight, scale)
    assert [(name, type(what)) for name, what in joined([("a.weight", weight), ("a.scale", scale)])] == [
        ("a.weight", str)
    ]


@pytest.mark.parametrize("scale_first", [True, False])
def test_weights_find_their_scales(scale_first: bool) -> None:
    (one, one_scale), (two, two_scale) = CASES["e4m3 by row"], CASES["packed e2m1"]
    stream = [("a.weight", one), ("b.weight", two), ("c.weight", torch.ones(3)), ("b.scale", two_scale)]
    stream += [("d.hc_attn_scale", torch.ones(3)), ("a.scale", one_scale)]
    got = dict(joined(reversed(stream) if scale_first else stream))
    assert set(got) == {"a.weight", "b.weight", "c.weight", "d.hc_attn_scale"}
    for name, pair in (("a.weight", (one, one_scale)), ("b.weight", (two, two_scale))):
        matrix = got[name]
        assert isinstance(matrix, QuantisedMatrix) and torch.equal(matrix.widen(), expected(*pair))
    plain = got["c.weight"]
    assert isinstance(plain, torch.Tensor) and torch.equal(plain, torch.ones(3))


def test_what_stays_alone_is_named() -> None:
    weight, scale = CASES["packed e2m1"]
    assert [name for name, _ in joined([("a.scale", scale), ("b.weight", weight)])] == [
        "a.scale",
        "b.weight (without its scale)",
    ]


@pytest.mark.parametrize("dim", [64, 40])
def test_table_rows_are_widened_as_they_are_read(dim: int) -> None:
    weight, scale = e4m3(11, 40, dim), scales(12, 40, 2)
    values = expected(weight, scale)
    ids = torch.randint(40, (5, 3), generator=generator(13))
    assert torch.equal(EngramTable(weight, scale).gather(ids), values[ids])
    assert torch.equal(EngramTable(values).gather(ids), values[ids])
