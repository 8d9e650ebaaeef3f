"""Attention on the emulated device for models that bring none of their own: vLLM's for CPUs, on the device's memory.

Its operations are the same for every device to torch, so that nothing would take them to the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from npu.memory import on_device, to_host


def _host(value: Any) -> Any:
    return to_host(value) if isinstance(value, torch.Tensor) and on_device(value) else value


class EmulatedAttentionBackend(CPUAttentionBackend):
    """Takes and gives tensors of the device."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """vLLM's hook."""
        return EmulatedAttention

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """vLLM's hook."""
        return EmulatedMetadataBuilder


class EmulatedMetadataBuilder(CPUAttentionMetadataBuilder):
    """Metadata on the host."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """vLLM's hook."""
        fields = {
            f.name: _host(getattr(common_attn_metadata, f.name)) for f in dataclasses.fields(common_attn_metadata)
        }
        return super().build(common_prefix_len, dataclasses.replace(common_attn_metadata, **fields), fast_build)


class EmulatedAttention(CPUAttentionBackendImpl):
    """Operands on the device."""

    def forward(self, layer: Any, *operands: Any, **named: Any) -> Any:
        """vLLM's hook: query, key, value, cache, metadata, output; what it returns nobody reads."""
        return super().forward(layer, *map(_host, operands), **{name: _host(value) for name, value in named.items()})

    def do_kv_cache_update(self, layer: Any, *operands: Any) -> None:
        """vLLM's hook: key, value, cache, slots."""
        super().do_kv_cache_update(layer, *map(_host, operands))
