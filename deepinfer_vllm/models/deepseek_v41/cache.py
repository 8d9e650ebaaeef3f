"""The paged caches a V4.1 model keeps, as layers that vLLM's KV cache manager allocates blocks for.

| cache | one row per | content | kept for |
|---|---|---|---|
| window | token and layer | K = V latent [head_dim] | the sliding window |
| compressed | `ratio` tokens, KV sources | latent [head_dim], index key [index_head_dim] | the whole request |
| open group | token, ratio-2 sources | projected kv, gate score [2 * head_dim], float32 | the last `ratio` tokens |
| n-gram history | token | compressed token id [1], int32 | the last n-gram |

Rows are of the model's dtype where none is given. Nothing else outlives a step, so chunk cuts, prefix hits, preemption
and resume need no code here.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

from deepinfer_vllm.models.deepseek_v41.backend import PagedRowsBackend


class PagedCache(nn.Module, AttentionLayerBase):
    """Rows of one layer in vLLM's paged memory, [blocks, rows per block, width] once bound.

    Rows are addressed by (request of the step, row index); the step's block table finds the block.
    """

    def __init__(self, name: str, spec: KVCacheSpec, registry: dict[str, Any]) -> None:
        super().__init__()
        if name in registry:
            raise ValueError(f"Duplicate cache layer name: {name}")
        registry[name] = self
        self.name = name
        self.spec = spec
        self.rows_per_block = int(spec.num_states)
        self.kv_cache = torch.tensor([])
        self._slots_per_block = 0
        """Rows from a block to the next, other layers' between them counted; 0 where that is no whole number, or before
        memory is bound."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        """vLLM's hook: how this layer's metadata is built."""
        return PagedRowsBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec:
        """vLLM's hook: what a block of this layer holds."""
        return self.spec

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """vLLM's hook: the allocated memory, [blocks, 1, rows per block, width] and strided."""
        self.kv_cache = cache = kv_cache.squeeze(1)
        blocks, rows, width = cache.shape
        per_block, odd = divmod(cache.stride(0), cache.stride(1))
        self._slots_per_block = 0 if odd else per_block
        if self._slots_per_block and blocks:
            slots = (blocks - 1) * per_block + rows
            self._slots = cache.as_strided((slots, width), (cache.stride(1), cache.stride(2)))

    def read(
        self,
        table: torch.Tensor,
        request: torch.Tensor,
        row: torch.Tensor,
        width: int | None = None,
        first: int = 0,
    ) -> torch.Tensor:
        """Rows at (request, row), which broadcast to a shape S: [*S, channels], those from `first` to below `width`."""
        block, offset = table[request, row // self.rows_per_block].long(), row % self.rows_per_block
        if not self._slots_per_block:
            return self.kv_cache[..., first:width][block, offset]
        slot = block * self._slots_per_block + offset
        return self._slots[:, first:width].index_select(0, slot.flatten()).unflatten(0, slot.shape)

    def located(
        self, table: torch.Tensor, request: torch.Tensor, row: torch.Tensor, valid: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [slots, width], the slot of each row at (request, row) [*S] int64, -1 where `valid` is not). Where a
        block's rows do not lie evenly, they are read first."""
        if not self._slots_per_block:
            rows = self.read(table, request, row, width).flatten(0, -2)
            return rows, torch.arange(len(rows), device=rows.device).view(row.shape).masked_fill(~valid, -1)
        block, offset = table[request, row // self.rows_per_block].long(), row % self.rows_per_block
        return self._slots[:, :width], (block * self._slots_per_block + offset).masked_fill(~valid, -1)

    def write_slots(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Store values [n, width] at slots [n] int64, block * rows per block + row in it; a negative one is skipped."""
        kept = slots >= 0
        slots = slots[kept]
        values = values[kept].to(self.kv_cache.dtype)
        self.kv_cache[slots // self.rows_per_block, slots % self.rows_per_block] = values

    def write(self, table: torch.Tensor, request: torch.Tensor, row: torch.Tensor, values: torch.Tensor) -> None:
        """Store values [n, width] at rows [n] of requests [n]."""
        block = table[request, row // self.rows_per_block].long()
        self.kv_cache[block, row % self.rows_per_block] = values.to(self.kv_cache.dtype)


def window_spec(
    block_size: int, width: int, dtype: torch.dtype, window: int, *, rebuilt: bool = False
) -> SlidingWindowMLASpec:
    """One row a token, kept for the last `window` tokens. `rebuilt`: after a prefix hit the scheduler recomputes the
    last window instead of finding it cached."""
    return SlidingWindowMLASpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=width,
        dtype=dtype,
        sliding_window=window,
        max_tp_shards=1,
        bounded_replay=rebuilt,
    )


def compressed_spec(block_size: int, width: int, dtype: torch.dtype, ratio: int) -> MLAAttentionSpec:
    """One row every `ratio` tokens, kept for the whole request."""
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=width,
        dtype=dtype,
        tokens_per_state=ratio,
        max_tp_shards=1,
    )
