"""Our platform in place of vllm-ascend's: one assignment in its module, as soon as that is imported."""

import functools
from typing import Any

from deepinfer_vllm.compat.late import after_import

MODULE = "vllm_ascend.platform"


@functools.cache
def graft_when_imported() -> None:
    """vLLM imports the platform by its name after all plugins have answered, so their order does not matter."""
    after_import(MODULE, graft)


def graft(module: Any) -> None:
    """Let the name NPUPlatform of `module` be our subclass of what it was; the log says so once it is set up."""
    from deepinfer_vllm.platforms.npu_platform import DeepInferAscendPlatform

    module.NPUPlatform = DeepInferAscendPlatform
