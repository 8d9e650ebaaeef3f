"""Expand the published quantised weights to float32 (exact: few bits times a power of two)."""

from __future__ import annotations

import torch

# The sixteen e2m1 codes: sign, two exponent bits, one mantissa bit.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
BLOCK = 32


def dequantise(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Multiply every `X.weight` that has an `X.scale` with it; drop the scales."""
    out = {}
    for name, tensor in weights.items():
        scale = weights.get(name.removesuffix(".weight") + ".scale") if name.endswith(".weight") else None
        if scale is not None:
            out[name] = _expand(tensor, scale)
        elif not name.endswith(".scale"):
            out[name] = tensor
    return out


def _expand(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [N, K] e4m3 or [N, K/2] packed e2m1 (low nibble first); scale ue8m0 [N or N/32, K/32]."""
    values = _unpack_e2m1(weight) if weight.dtype in (torch.int8, torch.uint8) else weight.float()
    factors = _ue8m0(scale).repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    if scale.shape[0] != values.shape[0]:
        factors = factors.repeat_interleave(BLOCK, dim=0)[: values.shape[0]]
    return values * factors


def _unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    codes = packed.view(torch.uint8).long()
    return E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)]


def _ue8m0(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.view(torch.uint8).float() - 127)
