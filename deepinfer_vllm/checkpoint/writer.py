"""Write a checkpoint directory: config, tokenizer, sharded weights with their index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from stat import S_IMODE
from typing import TYPE_CHECKING, Any

from deepinfer_vllm.checkpoint.special_tokens import IMAGE_SPAN_IDS
from deepinfer_vllm.checkpoint.tensor_spec import TensorSpec
from deepinfer_vllm.checkpoint.tensors import tensor_specs
from deepinfer_vllm.checkpoint.tokenizer import build_tokenizer, tokenizer_config

if TYPE_CHECKING:
    import torch

DTYPES = {"bf16": "bfloat16", "float32": "float32"}
INDEX = "model.safetensors.index.json"


Progress = Callable[[int, int], None]
"""Told (parameters drawn so far, all of them) after every tensor."""


def write_checkpoint(
    directory: Path, config: dict[str, Any], *, seed: int = 0, shards: int = 2, progress: Progress | None = None
) -> int:
    """Write the checkpoint of a published config; return its number of parameters.

    The same config, seed and shard count give the same bytes. The config's `dtype` is that of the weights; those that
    a release quantises are, where the config has a `quantization_config`.
    Files of the same names are replaced. `shards` is at least 1. Raises OSError when the directory cannot be written or
    is full.
    """
    write_texts(directory, config)
    return _write_weights(directory, config, seed, shards, progress)


def write_texts(directory: Path, config: dict[str, Any]) -> None:
    """Write what is no tensor: tokenizer, config.json, generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    text = config["text_config"]
    build_tokenizer(text["vocab_size"]).save(str(directory / "tokenizer.json"), pretty=False)
    _write_json(directory / "tokenizer_config.json", tokenizer_config(text["max_position_embeddings"]))
    _write_json(directory / "config.json", config)
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", {**generation, "do_sample": True, "temperature": 1.0})


def _write_weights(directory: Path, config: dict[str, Any], seed: int, shards: int, progress: Progress | None) -> int:
    """Fill shards in the order of the tensors, each up to an equal share of the parameters."""
    specs = list(tensor_specs(config))
    shards = min(shards, len(specs))
    sizes = [_count(spec) for spec in specs]
    total, before = sum(sizes), 0
    contents: list[list[TensorSpec]] = [[] for _ in range(shards)]
    for spec, size in zip(specs, sizes, strict=True):
        contents[before * shards // total].append(spec)
        before += size
    weight_map, size_bytes, drawn = {}, 0, 0
    for number, part in enumerate(contents, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        tensors = {}
        for spec in part:
            tensors.update(_published(spec, config, seed))
            drawn += _count(spec)
            if progress is not None:
                progress(drawn, total)
        save_tensors(tensors, directory / file, mode=(directory / "config.json").stat().st_mode)
        weight_map.update(dict.fromkeys(tensors, file))
        size_bytes += sum(t.numel() * t.element_size() for t in tensors.values())
    _write_json(directory / INDEX, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})
    return total


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, mode: int) -> None:
    """As safetensors writes, but with permissions `mode` (of the other files) and, as other files do, OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
    path.chmod(S_IMODE(mode))


def _count(spec: TensorSpec) -> int:
    count = 1
    for size in spec.shape:
        count *= size
    return count


def _published(spec: TensorSpec, config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """A tensor by its name; codes and scale of one that this config quantises."""
    values = _values(spec, config, seed)
    if "quantization_config" not in config:
        return {spec.name: values}
    from deepinfer_vllm.checkpoint.quantise import quantised

    return quantised(spec.name, values)


def _values(spec: TensorSpec, config: dict[str, Any], seed: int) -> torch.Tensor:
    """Values depend on the seed and the tensor's name alone, so that other tensors do not move them."""
    import numpy as np
    import torch

    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    drawn = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big"))).standard_normal(spec.shape)
    values = torch.from_numpy(spec.mean + spec.std * drawn)
    if spec.name == "head.weight":  # a text model should never answer with an image token
        image = config["image_token_id"]
        values[image : image + IMAGE_SPAN_IDS] = 0
    return values.to(torch.float32 if spec.is_float32 else getattr(torch, config["dtype"]))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
