"""`qat` against the cache records of vLLM's GPU kernels: rows are packed into their bytes here, and read back.

The formats are those of docs/numerics.md; scales are found with an exact logarithm.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from reference.dequantise import dequantise
from small_model import generator, normal

QAT = Numerics(quantised=True)
DIM, ROPE, INDEX_DIM = 512, 64, 128
Record = Callable[[torch.Tensor], torch.Tensor]


def power_of_two_blocks(x: torch.Tensor, block: int, largest: float, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x in blocks over its scale, float32; ue8m0 bytes)."""
    blocks = x.float().unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1).clamp_min(floor)
    exponent = torch.ceil(torch.log2((amax * (1.0 / largest)).double()))
    return blocks * torch.exp2(-exponent).float().unsqueeze(-1), (exponent + 127).to(torch.uint8)


def e4m3_bytes(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)


def e2m1_bytes(scaled: torch.Tensor) -> torch.Tensor:
    """Nearest code, ties to the even one, two a byte."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    distance = (scaled.abs().unsqueeze(-1) - grid).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    code = even_first[nearest[..., even_first].int().argmax(-1)] | torch.signbit(scaled).int() << 3
    code = code.flatten(-2)
    return (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8)


def mxfp8_528(x: torch.Tensor) -> torch.Tensor:
    """All channels e4m3, a scale for 32."""
    scaled, scale = power_of_two_blocks(x, 32, 448, 1e-4)
    record = torch.cat((e4m3_bytes(scaled), scale), dim=-1)
    assert record.shape[-1] == 528
    return dequantise({"x.weight": record[:, :DIM].view(torch.float8_e4m3fn), "x.scale": record[:, DIM:]})["x.weight"]


def v4_584(x: torch.Tensor) -> torch.Tensor:
    """The first 448 channels e4m3, a scale for 64; the rotated ones bf16."""
    scaled, scale = power_of_two_blocks(x[:, :-ROPE], 64, 448, 1e-4)
    tail = x[:, -ROPE:].bfloat16()
    record = torch.cat((e4m3_bytes(scaled), tail.view(torch.uint8), scale, torch.zeros_like(scale[:, :1])), dim=-1)
    assert record.shape[-1] == 584
    values = record[:, : DIM - ROPE].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 64))
    factors = torch.exp2(record[:, 576:583].float() - 127).unsqueeze(-1)
    return torch.cat(((values * factors).flatten(-2), record[:, 448:576].view(torch.bfloat16).float()), dim=-1)


def nvfp4_288(x: torch.Tensor) -> torch.Tensor:
    """e2m1, an e4m3 scale for 16."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) * (1.0 / 6.0)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
    packed = e2m1_bytes(blocks / scale.float().unsqueeze(-1))
    record = torch.cat((packed, scale.view(torch.uint8)), dim=-1)
    assert record.shape[-1] == 288
    ones = torch.full((len(x), DIM // 32), 127, dtype=torch.uint8)
    values = dequantise({"x.weight": record[:, :256], "x.scale": ones})["x.weight"].unflatten(-1, (-1, 16))
    return (values * record[:, 256:].view(torch.float8_e4m3fn).float().unsqueeze(-1)).flatten(-2)


def mxfp4_68(x: torch.Tensor) -> torch.Tensor:
    """e2m1, a power of two for 32."""
    scaled, scale = power_of_two_blocks(x, 32, 6, 6 * 2.0**-126)
    record = torch.cat((e2m1_bytes(scaled), scale), dim=-1)
    assert record.shape[-1] == 68
    return dequantise({"x.weight": record[:, :64], "x.scale": record[:, 64:]})["x.weight"]


def index_132(x: torch.Tensor) -> torch.Tensor:
    """e4m3, one power of two for all channels, kept as float32."""
    scaled, scale = power_of_two_blocks(x, INDEX_DIM, 448, 1e-4)
    factor = torch.exp2(scale.float() - 127)
    record = torch.cat((e4m3_bytes(scaled), factor.view(torch.uint8)), dim=-1)
    assert record.shape[-1] == 132
    return record[:, :128].view(torch.float8_e4m3fn).float() * record[:, 128:].view(torch.float32)


def rows(dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of many sizes; one of zeros, one of halfway values, some whose largest is the format's largest."""
    x = normal(1, 40, dim) * torch.logspace(-7, 4, 40).unsqueeze(-1)
    x[0] = 0
    x[1] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(dim // 8) * torch.tensor([1.0, -1]).repeat(
        dim // 2
    )
    x[2, ::16] = 448.0
    x[3, ::16] = 6.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ours", "record", "dim"),
    [(QAT.window, mxfp8_528, DIM), (QAT.compressed, nvfp4_288, DIM), (QAT.index, mxfp4_68, INDEX_DIM)],
    ids=["window in 528 bytes", "compressed in 288 bytes", "index in 68 bytes"],
)
def test_as_trained(ours: Record, record: Record, dim: int, dtype: torch.dtype) -> None:
    x = rows(dim, dtype)
    got = ours(x)
    assert got.dtype == dtype and torch.equal(got.float(), record(x))


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize(
    ("record", "trained", "dim"),
    [(mxfp8_528, QAT.compressed, DIM), (v4_584, QAT.compressed, DIM), (index_132, QAT.index, INDEX_DIM)],
    ids=["compressed in 528 bytes", "compressed in 584 bytes", "index in 132 bytes"],
)
def test_finer_than_trained(record: Record, trained: Record, dim: int) -> None:
    """fp8 of what was trained as fp4: nearer to the row than to what training saw."""
    x = normal(2, 200, dim)
    kept = record(x)
    assert rms(kept - x) < 0.3 * rms(trained(x) - x)
    assert rms(kept - x) < 0.3 * rms(kept - trained(x))


def test_a_window_row_in_584_bytes() -> None:
    """Its rotated channels are finer than trained; the others have half as many scales and are coarser, if anything."""
    x = normal(3, 200, DIM) * torch.rand(200, DIM, generator=generator(4)).pow(4)
    kept, trained = v4_584(x), QAT.window(x)
    tail, rest = slice(DIM - ROPE, DIM), slice(0, DIM - ROPE)
    assert rms(kept[:, tail] - x[:, tail]) < 0.2 * rms(trained[:, tail] - x[:, tail])
    assert rms(kept[:, rest] - x[:, rest]) >= rms(trained[:, rest] - x[:, rest])
    assert not torch.equal(kept[:, rest], trained[:, rest])
