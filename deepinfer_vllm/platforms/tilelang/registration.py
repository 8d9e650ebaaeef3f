"""Put the kernels in place of the portable model's operations through vLLM's hook for platforms.

vLLM asks its platform for overrides of kernels as a worker starts, before a model is built, and puts what it is given
wherever the name it replaces has been imported.
"""

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepinfer_vllm.platforms.tilelang import toolkit

logger = logging.getLogger("vllm.deepinfer")

_MODEL = "deepinfer_vllm.models.deepseek_v41"
_HERE = "deepinfer_vllm.platforms.tilelang"

KERNELS = {
    f"{_MODEL}.gather_attention.located_attention": f"{_HERE}.sparse_attention:sparse_attention",
    f"{_MODEL}.mhc.delayed": f"{_HERE}.delayed_mhc:delayed",
    f"{_MODEL}.mhc.gates": f"{_HERE}.delayed_mhc:gates",
    f"{_MODEL}.mhc.expand": f"{_HERE}.mhc_expand:expand",
    f"{_MODEL}.candidate_mask.mask_scores": f"{_HERE}.candidate_mask:candidate_mask",
}
"""Operation of the portable model to "module:function"."""

Register = Callable[[Mapping[str, Callable[..., Any]]], None]


def why_not(environ: Mapping[str, str], root: Path) -> str | None:
    """Why the kernels cannot be compiled here, in one sentence; None if they can."""
    if toolkit.compiler(environ, root) is None:
        return f"CANN's compiler `{toolkit.COMPILER}` is not on this machine"
    return toolkit.emitter()


def register(
    register_kernels: Register, environ: Mapping[str, str] | None = None, root: Path = Path("/")
) -> tuple[str, ...]:
    """For `Platform.register_triton_kernel_overrides`: hand all kernels to vLLM's `register_kernels`.

    Returns the names of what was replaced: none where CANN is not present in `environ` and below `root`, and the log
    says so. May be called again.
    """
    reason = why_not(os.environ if environ is None else environ, root)
    if reason:
        logger.info("DeepSeek-V4.1 runs on torch's operations, without TileLang's kernels: %s.", reason)
        return ()
    overrides = {}
    for name, target in KERNELS.items():
        module, _, function = target.partition(":")
        overrides[name] = getattr(importlib.import_module(module), function)
    register_kernels(overrides)
    logger.info("DeepSeek-V4.1 runs with %d TileLang kernels.", len(overrides))
    return tuple(overrides)
