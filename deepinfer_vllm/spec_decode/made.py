"""What an engine's confidences are of, told by its configuration."""

from pathlib import Path
from typing import Any

from deepinfer_vllm import envs
from deepinfer_vllm.spec_decode.calibration_file import Made, checkpoint_digest


def made_for(config: Any) -> Made:
    """Of vLLM's configuration with a local checkpoint. Raises OSError where its files cannot be read."""
    return Made(
        checkpoint_digest(Path(config.model_config.model)),
        config.speculative_config.num_speculative_tokens,
        str(config.model_config.dtype).removeprefix("torch."),
        str(envs.DEEPINFER_VLLM_NUMERICS),
    )
