"""Published quantised weights as plain ones, tensor by tensor while a checkpoint is read.

`X.weight` with `X.scale` beside it: e4m3 [N, K] with a power-of-two scale per [32, 32] block or per row and 32
columns, or e2m1 packed two a byte, low nibble first, [N, K / 2] with one per row and 32 columns. Each value is a few
bits times a power of two, so nothing is rounded in bf16 or wider.
"""

from collections.abc import Iterable, Iterator

import torch

BLOCK = 32
_QUANTISED = (torch.float8_e4m3fn, torch.int8, torch.uint8)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def widened(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass plain tensors through; join each quantised weight with its scale, whichever comes first.

    What stays alone is passed on at the end: a scale by its name, a weight as `<name> (without its scale)`.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "scale") or (kind == "weight" and tensor.dtype not in _QUANTISED):
            yield name, tensor
            continue
        other = waiting.pop(f"{stem}.{'scale' if kind == 'weight' else 'weight'}", None)
        if other is None:
            waiting[name] = tensor
        else:
            yield f"{stem}.weight", widen(tensor, other) if kind == "weight" else widen(other, tensor)
    for name, tensor in waiting.items():
        yield name if name.endswith(".scale") else f"{name} (without its scale)", tensor


def widen(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [N, K] e4m3 or [N, K / 2] packed e2m1, scale ue8m0 [N or N / 32, K / 32] to [N, K] float32."""
    values = weight.float() if weight.dtype == torch.float8_e4m3fn else _unpack(weight)
    factors = power_of_two(scale).repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    if scale.shape[0] != values.shape[0]:
        factors = factors.repeat_interleave(BLOCK, dim=0)[: values.shape[0]]
    if factors.shape != values.shape:
        raise ValueError(f"scale {list(scale.shape)} does not cover weight {list(values.shape)} in blocks of {BLOCK}")
    return values * factors


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """ue8m0 bytes to float32: 2 ** (byte - 127), the byte being a float32's exponent field; 0 is a subnormal."""
    exponent = scale.view(torch.uint8).int()
    return torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    codes = packed.view(torch.uint8).int()
    table = torch.tensor(_E2M1, device=packed.device)
    return table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)]
