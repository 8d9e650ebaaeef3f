"""vLLM's batch-invariant mode on a CPU: it puts Triton kernels in place of torch's softmax, mean and bmm there too."""

import functools
from typing import Any

from deepinfer_vllm.compat.late import after_import


def spare_cpu_kernels(architecture: str) -> None:
    """Leave torch's CPU functions alone where this architecture runs under VLLM_BATCH_INVARIANT: without Triton the
    first of them to be called ends the engine, and this model keeps its rows apart by itself."""

    def change(module: Any) -> None:
        init = module.init_batch_invariance
        if hasattr(init, "deepinfer_hooked"):
            return

        @functools.wraps(init)
        def init_elsewhere() -> None:
            from vllm.config import get_current_vllm_config_or_none
            from vllm.platforms import current_platform

            config = get_current_vllm_config_or_none()
            model = None if config is None else config.model_config
            if not (current_platform.is_cpu() and model is not None and architecture in model.architectures):
                init()

        init_elsewhere.deepinfer_hooked = True  # type: ignore[attr-defined]
        module.init_batch_invariance = init_elsewhere

    after_import("vllm.model_executor.determinism.batch_invariant", change)
