"""Rotary embedding over the last `qk_rope_head_dim` dimensions, in interleaved (even, odd) pairs."""

from __future__ import annotations

import math

import torch

from reference.config import Config


def frequencies(config: Config, ratio: int) -> torch.Tensor:
    """Radians per position for each pair, float64 [rope/2].

    Layers without compression rotate with `rope_theta` alone. Compressed layers use
    `compress_rope_theta` and YaRN; YaRN's magnitude factor is 1, so only frequencies change.
    """
    dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if ratio else config.rope_theta
    freqs = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return _yarn(freqs, dim, theta, config) if ratio else freqs


def _yarn(freqs: torch.Tensor, dim: int, theta: float, config: Config) -> torch.Tensor:
    """Divide slow frequencies by the factor, keep fast ones, blend linearly between."""
    scaling = config.rope_scaling
    original = scaling["original_max_position_embeddings"]

    def pair_with_turns(turns: float) -> float:
        """Index of the pair that turns that often over the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_turns(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_with_turns(scaling["beta_slow"])), dim - 1)
    width = high - low if high != low else 0.001
    slow = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return freqs * (1 - slow) + freqs / scaling["factor"] * slow


def rotate(x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Rotate x [T, ..., dim] at positions [T]; `inverse` undoes it. Leading dimensions of `dim` stay."""
    angles = positions.to(torch.float64)[:, None] * freqs
    shape = (angles.shape[0],) + (1,) * (x.dim() - 2) + (angles.shape[1],)
    cos, sin = angles.cos().view(shape).to(x.dtype), angles.sin().view(shape).to(x.dtype)
    if inverse:
        sin = -sin
    plain, tail = x[..., : -2 * angles.shape[1]], x[..., -2 * angles.shape[1] :]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([plain, turned], dim=-1)
