"""A published V4.1 checkpoint that is large on disk and takes little of it: Engram's tables are holes in their files.

All else is random bytes in the published formats. What a hole reads as, zeros, is a legal table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_vllm.checkpoint.quantise import CONFIG, quantised
from deepinfer_vllm.checkpoint.tensors import tensor_specs
from deepinfer_vllm.checkpoint.writer import INDEX, write_texts

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}
SCALE_BYTE = 120
"""2 ** -7: keeps random codes near the size of weights."""


@dataclass(frozen=True)
class Written:
    """What is in a checkpoint's shards."""

    bytes: int
    table_bytes: int
    largest_shard_bytes: int
    """Of those that are loaded."""


@dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    std: float
    mean: float

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def is_table(self) -> bool:
        return ".engram.embed." in self.name


def write(directory: Path, config: dict[str, Any], shard_bytes: int) -> Written:
    """Write the checkpoint of a published config, quantised, in shards of about that size and one for every table.

    Raises OSError when the directory cannot be written or is full.
    """
    config = {**config, "quantization_config": CONFIG}
    write_texts(directory, config)
    shards = list(_shards(config, shard_bytes))
    weight_map, generator = {}, torch.Generator().manual_seed(0)
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(directory / file, tensors, generator)
        weight_map.update({tensor.name: file for tensor in tensors})
    sizes = [sum(t.nbytes for t in tensors) for tensors in shards]
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}))
    return Written(
        bytes=sum(sizes),
        table_bytes=sum(t.nbytes for tensors in shards for t in tensors if t.is_table),
        largest_shard_bytes=max(size for size, tensors in zip(sizes, shards, strict=True) if not tensors[0].is_table),
    )


def _shards(config: dict[str, Any], shard_bytes: int) -> Iterator[list[_Tensor]]:
    part: list[_Tensor] = []
    for spec in tensor_specs(config):
        dtype = torch.float32 if spec.is_float32 else torch.bfloat16
        described = quantised(spec.name, torch.empty(spec.shape, dtype=dtype, device="meta"))
        tensors = [_Tensor(name, t.dtype, tuple(t.shape), spec.std, spec.mean) for name, t in described.items()]
        if tensors[0].is_table:
            yield tensors
            continue
        if part and sum(t.nbytes for t in part + tensors) > shard_bytes:
            yield part
            part = []
        part += tensors
    yield part


def _write_shard(path: Path, tensors: list[_Tensor], generator: torch.Generator) -> None:
    header, offset = {}, 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        header[tensor.name], offset = entry, end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            if tensor.is_table:
                file.seek(tensor.nbytes, 1)
            else:
                file.write(_content(tensor, generator).contiguous().view(torch.uint8).numpy().data)
        file.truncate()


def _content(tensor: _Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.dtype == torch.float8_e8m0fnu:
        return torch.full(tensor.shape, SCALE_BYTE, dtype=torch.uint8)
    if tensor.dtype in (torch.int8, torch.float8_e4m3fn):
        codes = torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator)
        return codes if tensor.dtype == torch.int8 else codes & 0xBF  # below 2, so no NaN
    return (torch.randn(tensor.shape, generator=generator) * tensor.std + tensor.mean).to(tensor.dtype)
