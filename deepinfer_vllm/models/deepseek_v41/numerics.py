"""Fake quantisation of what the released model caches: value in, the nearest value its record can hold out.

The weights were trained through these roundings. `plain` leaves values alone; `qat` applies them:

| what | elements | scale, per block |
|---|---|---|
| window KV, after RoPE | e4m3 | power of two, 32 channels |
| compressed KV, after RoPE | e2m1 | e4m3, 16 channels |
| index queries and keys, after RoPE | e2m1 | power of two, 32 channels |

A width that its block does not divide is left alone. Rounding is to nearest, ties to even.
"""

from dataclasses import dataclass

import torch

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0


@dataclass(frozen=True)
class Numerics:
    """How cached values are rounded."""

    quantised: bool

    def window(self, x: torch.Tensor) -> torch.Tensor:
        """Window KV [..., D]."""
        if not self.quantised or x.shape[-1] % 32:
            return x
        blocks = x.float().unflatten(-1, (-1, 32))
        scale = power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4), _E4M3_MAX)
        values = (blocks / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()
        return (values * scale).flatten(-2).to(x.dtype)

    def compressed(self, x: torch.Tensor) -> torch.Tensor:
        """Compressed KV [..., D]."""
        if not self.quantised or x.shape[-1] % 16:
            return x
        blocks = x.float().unflatten(-1, (-1, 16))
        amax = blocks.abs().amax(-1, keepdim=True).clamp_min(_E2M1_MAX * 2.0**-9)
        scale = (amax / _E2M1_MAX).clamp_max(_E4M3_MAX).to(torch.float8_e4m3fn).float()  # not every device saturates
        return (round_e2m1(blocks / scale) * scale).flatten(-2).to(x.dtype)

    def index(self, x: torch.Tensor) -> torch.Tensor:
        """Index queries or keys [..., D]."""
        if not self.quantised or x.shape[-1] % 32:
            return x
        blocks = x.float().unflatten(-1, (-1, 32))
        amax = blocks.abs().amax(-1, keepdim=True).clamp_min(_E2M1_MAX * 2.0**-126)
        scale = power_of_two_scale(amax, _E2M1_MAX)
        return (round_e2m1(blocks / scale) * scale).flatten(-2).to(x.dtype)


def power_of_two_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The smallest power of two s with amax / s <= largest, from the float32 exponent, so that no log rounds."""
    bits = (amax * (1.0 / largest)).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign of x; ties to the even code; beyond 6 is 6."""
    size = x.abs().clamp_max(_E2M1_MAX)
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0)).to(size.dtype)
    nearest = torch.round(size / step) * step
    return torch.where(x < 0, -nearest, nearest)  # NPUs have no copysign
