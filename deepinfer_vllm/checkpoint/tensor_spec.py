"""One tensor of a checkpoint to be written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """Normally distributed values. `is_float32` tensors keep that type whatever the checkpoint's own is."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    is_float32: bool = False
