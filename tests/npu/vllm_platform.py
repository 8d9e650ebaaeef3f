"""vLLM's platform for the emulated device: out of the tree, as an NPU's is, and found by an entry point.

Where vLLM has Triton kernels, an NPU's platform brings its own. The emulated device's are the host's: vLLM's for CPUs,
and this project's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform, PlatformEnum

from npu import device
from npu.memory import AWAY, NAME, on_device, to_host

device.install()


class EmulatedNpuPlatform(Platform):
    """One device, no graphs, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = device_type = NAME
    dispatch_key = "PrivateUse1"
    dist_backend = "gloo"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    simple_compile_backend = "eager"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """For logs."""
        return "emulated npu"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes."""
        return device.MEMORY_BYTES

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Random numbers are the host's."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """No."""
        return False

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """All."""

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """vLLM's hook: several caches a layer are no trouble, and V4.1 has them."""

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """One."""
        return 1

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Not counted."""
        return 0

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        """For models that bring none of their own."""
        return "npu.attention.EmulatedAttentionBackend"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM's hook."""
        from vllm.config import CompilationMode, CUDAGraphMode

        vllm_config.parallel_config.worker_cls = "npu.worker.EmulatedWorker"
        vllm_config.scheduler_config.async_scheduling = False
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        vllm_config.compilation_config.cudagraph_capture_sizes = []

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's hook."""
        CpuPlatform.import_kernels()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """vLLM's hook: the host's kernels, launched on the device's memory."""
        from vllm.triton_utils import dispatcher

        from deepinfer_vllm.compat.runner_v2 import register_torch_kernels

        register = dispatcher.register_kernels

        def register_all(overrides: dict[str, Callable[..., Any]]) -> None:
            register({name: _on_device(kernel) for name, kernel in overrides.items()})

        dispatcher.register_kernels = register_all
        try:
            CpuPlatform.register_triton_kernel_overrides()
            register_torch_kernels()
        finally:
            dispatcher.register_kernels = register


def _on_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The host's kernel with the device's memory, also where it is given as addresses."""
    names = list(inspect.signature(kernel).parameters)

    @functools.wraps(kernel)
    def launch(*args: Any, **kwargs: Any) -> Any:
        lowered = [_lower(name, value) for name, value in zip(names, args, strict=False)]
        return kernel(*lowered, *args[len(names) :], **{name: _lower(name, value) for name, value in kwargs.items()})

    return launch


def _lower(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not on_device(value):
        return value
    there = to_host(value)
    addresses = name.endswith(("_ptrs", "_addrs_ptr")) or value.dtype == torch.uint64
    return torch.from_numpy(there.numpy() - there.numpy().dtype.type(AWAY)) if addresses else there


def platform() -> str:
    """The entry point of `vllm.platform_plugins`."""
    return f"{__name__}.{EmulatedNpuPlatform.__qualname__}"


def accept_runner_v2() -> None:
    """The entry point of `vllm.general_plugins`: vLLM refuses runner V2 without Triton, of which an NPU has its own."""
    from deepinfer_vllm.compat import runner_v2

    runner_v2._complete_placeholder()
    runner_v2._allow_v2()
    runner_v2._pass_grids()
    runner_v2._look_into_dicts_alone()
