"""DeepSeek-V4.1-Flash in plain PyTorch, on any device vLLM has a platform for.

The class is named here because vLLM resolves it by this path and hashes this package to cache what it is.
"""

from deepinfer_vllm.models.deepseek_v41.model import DeepseekV41ForCausalLM

__all__ = ["DeepseekV41ForCausalLM"]
