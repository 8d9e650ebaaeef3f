"""An Engram table read in place from the checkpoint: only the rows a step asks for take memory."""

from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.models.deepseek_v41.quantised_matrix import BLOCK, E4M3, QuantisedMatrix
from deepinfer_vllm.models.deepseek_v41.safetensors_map import find_shard, map_tensor


@dataclass(frozen=True)
class EngramTable:
    """Mapped rows on the host."""

    rows: torch.Tensor
    """[rows, dim], plain or e4m3."""
    scale: torch.Tensor | None = None
    """[rows, ceil(dim / 32)] ue8m0 bytes, for e4m3 rows."""

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [*ids.shape, dim] on the host, plain values; ids int64 on any device."""
        ids = ids.to(self.rows.device)
        if self.scale is None:
            return self.rows[ids]
        each = ids.flatten()
        codes = self.rows.view(torch.uint8)[each].view(E4M3)
        return QuantisedMatrix(codes, self.scale[each]).widen().view(*ids.shape, -1)


def open_tables(config: ModelConfig, directory: Path) -> dict[int, EngramTable]:
    """Every Engram table of a checkpoint by layer, shapes checked. Raises CheckpointError."""
    engram = config.engram
    if engram is None:
        return {}
    tables = {}
    for layer_id, num_rows in zip(engram.layer_ids, engram.num_rows, strict=True):
        name = f"layers.{layer_id}.engram.embed"
        rows = _map(directory, f"{name}.weight", (num_rows, engram.head_dim))
        quantised = rows.dtype == E4M3
        scale = _map(directory, f"{name}.scale", (num_rows, -(-engram.head_dim // BLOCK))) if quantised else None
        tables[layer_id] = EngramTable(rows, scale)
    return tables


def _map(directory: Path, name: str, shape: tuple[int, int]) -> torch.Tensor:
    shard = find_shard(directory, name)
    if shard is None or not shard.is_file():
        raise CheckpointError(f"Engram table {name} is in no shard of {directory}. Restore the file that holds it")
    tensor = map_tensor(shard, name)
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"Engram table {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)} "
            "(engram_num_embeddings, engram_head_dim). Use the config that belongs to the checkpoint"
        )
    return tensor
