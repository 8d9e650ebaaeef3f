"""Tensors of a checkpoint read in place: mapped from the file, so only touched pages take memory."""

import json
import mmap
from pathlib import Path

import numpy as np
import torch

from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError

CHECKPOINT_FILES = "model*.safetensors"
"""The published shards; other safetensors files in the folder are not weights."""

_DTYPES: dict[str, tuple[type, torch.dtype]] = {
    "BF16": (np.uint16, torch.bfloat16),
    "F16": (np.float16, torch.float16),
    "F32": (np.float32, torch.float32),
    "F8_E4M3": (np.uint8, torch.float8_e4m3fn),
    "F8_E8M0": (np.uint8, torch.uint8),
    "U8": (np.uint8, torch.uint8),
}


def stored_tensors(directory: Path) -> dict[str, dict]:  # type: ignore[type-arg]
    """Every tensor of every shard by name: `dtype` as safetensors names it, `shape`, `data_offsets`.

    Reads headers only. Empty for what is not a directory. Raises CheckpointError for a shard that is cut off or
    otherwise no safetensors file.
    """
    entries = {}
    for shard in sorted(directory.glob(CHECKPOINT_FILES)):
        entries.update(_header(shard)[0])
    entries.pop("__metadata__", None)
    return entries


def find_shard(directory: Path, name: str) -> Path | None:
    """The shard that holds tensor `name`: by the index where there is one, else by each file's header.

    Raises CheckpointError for an index that cannot be read.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            shard = json.loads(index.read_text())["weight_map"].get(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of shards ({error!r}). Fetch it again") from None
        return directory / shard if shard else None
    return next((f for f in sorted(directory.glob(CHECKPOINT_FILES)) if name in _header(f)[0]), None)


def map_tensor(shard: Path, name: str) -> torch.Tensor:
    """Tensor `name` of a shard, mapped copy-on-write and advised for random access.

    Raises CheckpointError where the shard does not hold it, ValueError for a dtype that no Engram table is stored in.
    """
    header, data_start = _header(shard)
    if name not in header:
        raise CheckpointError(f"{shard} does not hold {name}, though the index says so. Fetch both again")
    entry = header[name]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{shard.name}: {name} has dtype {entry['dtype']}; only {', '.join(_DTYPES)} can be mapped")
    stored, dtype = _DTYPES[entry["dtype"]]
    start = data_start + entry["data_offsets"][0]
    array = np.memmap(shard, stored, mode="c", offset=start, shape=tuple(entry["shape"]))
    array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return torch.from_numpy(array).view(dtype)


def _header(shard: Path) -> tuple[dict[str, dict], int]:  # type: ignore[type-arg]
    """(entries by tensor name, byte offset of the data); format: 8-byte little-endian length, JSON, data.

    Raises CheckpointError when the file does not end where its header says.
    """
    size = shard.stat().st_size
    with shard.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 0 < length <= size - 8:
            raise CheckpointError(f"{shard} ends within its header ({size} bytes). Fetch the file again")
        try:
            entries = json.loads(f.read(length))
            end = 8 + length + max((e["data_offsets"][1] for k, e in entries.items() if k != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{shard} has no safetensors header ({error!r}). Fetch the file again") from None
    if size != end:
        raise CheckpointError(f"{shard} has {size} bytes, its header says {end}. Fetch the file again")
    return entries, 8 + length
