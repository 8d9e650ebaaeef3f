"""The shipped weights, bf16 in one file beside this module, and their card: how they were made and what they can."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from deepinfer_vllm.checkpoint.create import Created, make_room
from deepinfer_vllm.checkpoint.tensors import tensor_specs
from deepinfer_vllm.checkpoint.writer import DTYPES, save_tensors, write_texts
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.training.architecture import TRAINED
from deepinfer_vllm.training.parameters import Weights

WEIGHTS, CARD = "pair.safetensors", "pair.json"


def card() -> dict[str, Any]:
    """The shipped weights' digest, recipe and scores."""
    content: dict[str, Any] = json.loads(files(__package__).joinpath(CARD).read_text(encoding="utf-8"))
    return content


def shipped_weights() -> Weights:
    """Every tensor, bf16, by its published name. Raises CheckpointError when the file is not the card's."""
    from safetensors.torch import load

    content, wanted = files(__package__).joinpath(WEIGHTS).read_bytes(), card()["sha256"]
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        raise CheckpointError(
            f"the shipped {WEIGHTS} has sha256 {found[:16]}..., its card {wanted[:16]}...: install the package again"
        )
    return dict(load(content))


def write_trained(directory: Path, *, dtype: str = "bf16", force: bool = False) -> Created:
    """Write the shipped pair as a checkpoint in the published form; float32 has the same values as bf16.

    Raises CheckpointError for an unknown dtype, a directory that holds something and may not be replaced, and shipped
    weights that are not their card's; OSError when the directory cannot be written.
    """
    return write_pair(directory, shipped_weights(), dtype=dtype, force=force)


def write_pair(directory: Path, weights: Weights, *, dtype: str = "bf16", force: bool = False) -> Created:
    """Write weights of that architecture, by their published names, as a checkpoint. Raises as `write_trained`."""
    if dtype not in DTYPES:
        raise CheckpointError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    config = TRAINED.published(DTYPES[dtype])
    make_room(directory, force)
    write_texts(directory, config)
    tensors = {
        spec.name: weights[spec.name].to(torch.float32 if spec.is_float32 else getattr(torch, config["dtype"]))
        for spec in tensor_specs(config)
    }
    mode = (directory / "config.json").stat().st_mode
    save_tensors(tensors, directory / "model.safetensors", mode)
    return Created.of(directory, sum(tensor.numel() for tensor in tensors.values()))
