"""Weights into the published quantised formats: what is quantised, how its scale is chosen, how values are rounded.

| tensor | codes | one ue8m0 scale for |
|---|---|---|
| linears of attention, index queries, shared experts, Engram's and DSpark's projections | e4m3 | 32 rows, 32 columns |
| routed experts | e2m1, two a byte, the low nibble first | 32 columns of a row |
| Engram tables | e4m3 | 32 columns of a row |

A scale is the least power of two with which a block's largest value fits the format. Values are rounded to the nearest
code, halfway ones to the even code.
"""

from __future__ import annotations

import re
from typing import Any

import torch

BLOCK = 32
CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
"""`quantization_config` of such a checkpoint."""

_EXPERT = re.compile(r"(layers|mtp)\.\d+\.ffn\.experts\.\d+\.w[123]")
_TABLE = re.compile(r"layers\.\d+\.engram\.embed")
_LINEAR = re.compile(
    r"(layers|mtp)\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123]|engram\.wkv|main_proj)"
)
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_BIAS, _LARGEST_BYTE = 127, 246


def quantised(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor as it is published: itself, or its codes and `scale`. Raises ValueError for e2m1 of an odd width."""
    stem = name.removesuffix(".weight")
    if _EXPERT.fullmatch(stem):
        codes, scale = to_e2m1(values)
    elif _TABLE.fullmatch(stem):
        codes, scale = to_e4m3(values, rows=1)
    elif _LINEAR.fullmatch(stem):
        codes, scale = to_e4m3(values, rows=BLOCK)
    else:
        return {name: values}
    return {name: codes, f"{stem}.scale": scale}


def to_e4m3(values: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] to e4m3 [N, K] and ue8m0 [ceil(N / rows), ceil(K / 32)]."""
    scale, factors = _scales(values, rows, _E4M3_MAX)
    return (values.double() / factors).to(torch.float8_e4m3fn), scale


def to_e2m1(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] to int8 [N, K / 2] and ue8m0 [N, ceil(K / 32)]. Raises ValueError for an odd K."""
    if values.shape[1] % 2:
        raise ValueError(f"{values.shape[1]} columns: e2m1 codes stand two in a byte, so the number must be even")
    scale, factors = _scales(values, 1, _E2M1_MAX)
    size = (values.double() / factors).abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for below, midpoint in enumerate(_E2M1_MIDPOINTS):  # between the codes `below` and `below + 1`
        codes += size >= midpoint if below % 2 else size > midpoint
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8), scale


def _scales(values: torch.Tensor, rows: int, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(ue8m0 by block, the power of two of every value [N, K] float64). A block of zeros has scale 1."""
    n, k = values.shape
    padded = torch.nn.functional.pad(values.double().abs(), (0, -k % BLOCK, 0, -n % rows))
    amax = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows)).amax(dim=(1, 3))
    mantissa, exponent = torch.frexp(amax / largest)  # amax / largest = mantissa * 2 ** exponent, 0.5 <= mantissa < 1
    exponent = exponent - (mantissa == 0.5).int()
    scale = torch.where(amax == 0, 0, exponent).add(_BIAS).clamp(0, _LARGEST_BYTE)
    factors = torch.ldexp(torch.ones_like(amax), scale - _BIAS)
    each = factors.repeat_interleave(rows, dim=0)[:n].repeat_interleave(BLOCK, dim=1)[:, :k]
    return scale.to(torch.uint8).view(torch.float8_e8m0fnu), each
