"""Quantise and dequantise, as the released model was trained with ("qat").

Three places: the sliding-window KV (e4m3), the compressed KV (e2m1 with e4m3 scales) and the
indexer's queries and keys (e2m1 with power-of-two scales). Values are taken in float32, rounded to
nearest even. A last dimension that its block does not divide stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

E4M3_MAX, E2M1_MAX = 448.0, 6.0


def window_kv(x: torch.Tensor) -> torch.Tensor:
    """e4m3 in blocks of 32, scale 2^ceil(log2(amax / 448)), amax at least 1e-4."""
    return _blockwise(x, 32, lambda block: _scaled(block, _power_of_two(block, E4M3_MAX, 1e-4), _e4m3))


def compressed_kv(x: torch.Tensor) -> torch.Tensor:
    """e2m1 in blocks of 16, scale e4m3(amax / 6), amax at least 6 * 2^-9 (the least e4m3 step)."""

    def quantise(block: torch.Tensor) -> torch.Tensor:
        amax = block.abs().amax(-1, keepdim=True).clamp(min=E2M1_MAX * 2**-9)
        return _scaled(block, _e4m3(amax / E2M1_MAX), _e2m1)

    return _blockwise(x, 16, quantise)


def indexer(x: torch.Tensor) -> torch.Tensor:
    """e2m1 in blocks of 32, scale 2^ceil(log2(amax / 6))."""
    tiny = E2M1_MAX * 2.0**-126
    return _blockwise(x, 32, lambda block: _scaled(block, _power_of_two(block, E2M1_MAX, tiny), _e2m1))


def _blockwise(x: torch.Tensor, size: int, quantise: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if x.shape[-1] % size:
        return x
    return quantise(x.float().unflatten(-1, (-1, size))).flatten(-2).to(x.dtype)


def _scaled(block: torch.Tensor, scale: torch.Tensor, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return cast(block / scale) * scale


def _power_of_two(block: torch.Tensor, largest: float, floor: float) -> torch.Tensor:
    """The least power of two that brings the block's largest magnitude to `largest` or below.

    frexp gives m in [0.5, 1) and e with amax / largest = m * 2^e; ceil(log2) is e, or e - 1 when m is
    exactly 0.5. This avoids log2, whose last bit could put an exact power of two one step too high.
    """
    mantissa, exponent = torch.frexp(block.abs().amax(-1, keepdim=True).clamp(min=floor) / largest)
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to 0, 0.5, 1, 1.5, 2, 3, 4, 6. The step is 0.5 below 2, 1 below 4, 2 below 6."""
    magnitude = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.round(magnitude / step) * step * x.sign()  # torch.round goes to even
