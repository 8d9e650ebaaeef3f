"""Read the tensors of a checkpoint: one safetensors file or shards with an index."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from reference.dequantise import dequantise

INDEX = "model.safetensors.index.json"


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors by their published names, quantised ones expanded to float32."""
    if (directory / INDEX).exists():
        weight_map: dict[str, str] = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    else:
        files = ["model.safetensors"]
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights.update(load_file(directory / file))
    return dequantise(weights)
