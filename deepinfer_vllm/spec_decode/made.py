"""What an engine's confidences are of, told by its configuration."""

from typing import Any

from deepinfer_vllm import envs
from deepinfer_vllm.models.deepseek_v41.weights import checkpoint_directory
from deepinfer_vllm.spec_decode.calibration_file import Made, checkpoint_digest


def made_for(config: Any) -> Made:
    """Of vLLM's configuration. Raises OSError where the checkpoint's files cannot be read."""
    return Made(
        checkpoint_digest(checkpoint_directory(config.model_config.model, config.model_config.revision)),
        config.speculative_config.num_speculative_tokens,
        str(config.model_config.dtype).removeprefix("torch."),
        str(envs.DEEPINFER_VLLM_NUMERICS),
        str(config.speculative_config.draft_sample_method),
    )
