"""Copies between a device's KV blocks and host rows by torch's own copies, on platforms out of vLLM's tree.

vLLM's own worker (0.32, 0.33) is for CUDA, ROCm and XPU, and refuses every other.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from deepinfer_vllm.kv_connector.cpu_worker import CpuOffloadingWorker


class DeviceOffloadingWorker(CpuOffloadingWorker):
    """As on a CPU, page by page on a thread. Each job waits for all that the device had been given when it was
    submitted: the step that wrote its blocks, or one that still reads what it is to overwrite."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._device = kv_caches.tensors[0].tensor.device
        super().__init__(kv_caches, blocks_per_chunk, region)

    def _rows(self, tensor: torch.Tensor, row_bytes: int) -> torch.Tensor:
        rows = tensor.view(torch.int8)
        assert rows.shape[1] == row_bytes
        return rows

    def _fence(self) -> Callable[[], None]:
        moment = torch.Event(device=self._device)
        moment.record()
        wait: Callable[[], None] = moment.synchronize
        return wait

    @torch.inference_mode()
    def _copy(self, destination: Any, source: Any) -> int:
        destination.copy_(source)  # done when this returns: it is not told that it need not be
        return int(source.numel())
