"""Model registration: which DeepSeek-V4.1 implementation vLLM builds on this platform."""

from deepinfer_vllm import compat, envs

ARCHITECTURE = "DeepseekV41ForCausalLM"
PORTABLE_CLASSES = {
    ARCHITECTURE: "deepinfer_vllm.models.deepseek_v41:DeepseekV41ForCausalLM",
    "DSparkV41DraftModel": "deepinfer_vllm.models.deepseek_v41:DSparkV41DraftModel",
}


def uses_portable_model() -> bool:
    """Whether this process builds our V4.1: on CPU and out-of-tree platforms, elsewhere only when asked for.

    vLLM's own V4.1 covers CUDA and ROCm; everywhere else its name resolves to the NVIDIA class, which cannot run.
    """
    choice = envs.DEEPINFER_VLLM_MODEL
    if choice != "auto":
        return bool(choice == "portable")
    from vllm.platforms import current_platform

    return not (current_platform.is_cuda() or current_platform.is_rocm())


def register_models() -> None:
    """Register our V4.1 by string path, so that nothing heavy is imported until a V4.1 model is built. Re-entrant."""
    if not uses_portable_model():
        return
    from vllm import ModelRegistry

    for architecture, portable in PORTABLE_CLASSES.items():
        ModelRegistry.register_model(architecture, portable)
    compat.spare_cpu_kernels(ARCHITECTURE)
    compat.hook_model_config(ARCHITECTURE, "deepinfer_vllm.models.deepseek_v41.verify_config")
