"""DeepSeek-V4.1-Flash in plain PyTorch, on any device vLLM has a platform for.

The classes are named here because vLLM resolves them by this path and hashes this package to cache what they are. They
are imported when asked for: what needs a light module of this package only, such as its errors, does not wait for vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_vllm.models.deepseek_v41.dspark import DSparkV41DraftModel
    from deepinfer_vllm.models.deepseek_v41.model import DeepseekV41ForCausalLM

__all__ = ["DSparkV41DraftModel", "DeepseekV41ForCausalLM"]


def __getattr__(name: str) -> Any:
    if name == "DeepseekV41ForCausalLM":
        from deepinfer_vllm.models.deepseek_v41.model import DeepseekV41ForCausalLM

        return DeepseekV41ForCausalLM
    if name == "DSparkV41DraftModel":
        from deepinfer_vllm.models.deepseek_v41.dspark import DSparkV41DraftModel

        return DSparkV41DraftModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
