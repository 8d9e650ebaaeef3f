"""Rotary embedding of the last `rope_dim` channels, interleaved pairs (even, odd), plain or YaRN.

YaRN ("YaRN: Efficient Context Window Extension", Peng et al. 2023, section 3.2) with its attention temperature left at
1, as V4.1 is trained. Angles are computed per step: a table for a million positions would cost 256 MB a device.
"""

import math

import torch

from deepinfer_vllm.models.deepseek_v41.config import RopeConfig
from deepinfer_vllm.native import invariance, invariant


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """Float32 [dim / 2] rotation per position, radians."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.factor == 1.0:
        return frequencies
    low, high = (_correction_dim(rope, beta) for beta in (rope.beta_fast, rope.beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def _correction_dim(rope: RopeConfig, rotations: float) -> float:
    """The channel pair that turns `rotations` times over the original context."""
    return rope.dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


class RotaryTable:
    """cos and sin of one step's positions by channel, [T, dim] float32; sin with the sign that its channel adds it."""

    def __init__(self, positions: torch.Tensor, frequencies: torch.Tensor) -> None:
        if invariance.by_rows():
            self.cos, self.sin = invariant.rotary(positions, frequencies)
            return
        angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
        sin = angles.sin()
        self.cos = angles.cos().repeat_interleave(2, dim=-1)
        self.sin = torch.stack((-sin, sin), dim=-1).flatten(-2)


def rotate(x: torch.Tensor, table: RotaryTable, *, inverse: bool = False) -> torch.Tensor:
    """Rotate the last channels of x [T, D] or [T, H, D]; `inverse` undoes it. Computed in float32, x's dtype out."""
    if invariance.by_rows():
        return invariant.rotate(x, table.cos, table.sin, inverse=inverse)
    cos, sin = (table.cos, table.sin) if x.dim() == 2 else (table.cos.unsqueeze(1), table.sin.unsqueeze(1))
    dim = cos.shape[-1]
    channels = x[..., -dim:].float()
    partners = channels.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    out = x.clone()
    out[..., -dim:] = torch.addcmul(channels * cos, partners, sin, value=-1 if inverse else 1)
    return out
