"""vLLM's attention-backend interface for paged rows: a block table and the batch's shape, nothing computed."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout


@dataclass
class PagedRowsMetadata(AttentionMetadata):
    """What a step tells one cache group."""

    block_table: torch.Tensor
    """[requests, blocks] int, on the device; 0 where a block is gone or not yet there."""
    query_start: torch.Tensor
    """[requests + 1] int, on the CPU: where each request's new tokens start in the batch."""
    seq_lens: torch.Tensor
    """[requests] int, on the CPU: tokens of each request once this step is done."""


class PagedRowsBuilder(AttentionMetadataBuilder[PagedRowsMetadata]):
    """Passes the batch's shape through."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedRowsMetadata:
        """vLLM's hook, once a step and cache group."""
        m = common_attn_metadata
        return PagedRowsMetadata(m.block_table_tensor, m.query_start_loc_cpu, m.seq_lens_cpu_upper_bound)


class PagedRowsBackend(AttentionBackend):
    """Caches of V4.1. The model reads and writes rows itself, so there is no attention implementation."""

    supported_dtypes = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Shown in vLLM's logs."""
        return "DEEPINFER_PAGED_ROWS"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """There is none: see the class docstring."""
        raise NotImplementedError("DEEPINFER_PAGED_ROWS has no attention implementation; the V4.1 model is its own")

    @staticmethod
    def get_builder_cls() -> type[PagedRowsBuilder]:
        """vLLM's hook."""
        return PagedRowsBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """vLLM's hook, under VLLM_BATCH_INVARIANT: the model sees to it (`native.invariance`)."""
        return True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any block size: there is no kernel to please."""
        return [MultipleOf(1)]

    @classmethod
    def is_mla(cls) -> bool:
        """One latent a row, no separate V."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Block-outermost: pages of several widths stand side by side in a block."""
        return (KVCacheLayout.BLHNC,)
