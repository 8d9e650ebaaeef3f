"""vLLM's worker on the emulated device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes


class EmulatedWorker(Worker):
    """What vLLM's does on CUDA devices, with its own runners, but for what asks for CUDA by name."""

    def init_device(self) -> None:
        """vLLM's hook."""
        self.device = torch.device(f"{current_platform.device_type}:{self.local_rank}")
        current_platform.set_device(self.device)
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        self._init_workspace_and_model_runner()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """vLLM's hook: what was asked for, once a step of the largest size has run."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.profile_run()
        asked = self.cache_config.kv_cache_memory_bytes
        assert asked is not None, "kv_cache_memory_bytes must be given: an emulated device has no memory to measure"
        return asked

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """vLLM's hook. Nothing is compiled, and vLLM's own warms up kernels of CUDA devices."""
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)
