"""What the chunk scheduler asks of an engine as it starts."""

from collections.abc import Callable
from typing import Any

from deepinfer_vllm.scheduling.settings import Settings


def check_config(scheduler: Any, settings: Settings, warn: Callable[[str], None]) -> bool:
    """Whether a vLLM scheduler's chunks can be cut. Warns of what is not as wanted then.

    Raises ValueError where vLLM cuts chunks at positions of its own.
    """
    if getattr(scheduler, "need_mamba_block_aligned_split", False):
        raise ValueError(
            "mamba_cache_mode='align' ends chunks where states are cached, and CostModelScheduler ends them elsewhere; "
            "leave --scheduler-cls out for this model, or set --mamba-cache-mode none"
        )
    config = scheduler.scheduler_config
    if not config.enable_chunked_prefill:
        warn("Without chunked prefill CostModelScheduler has nothing to cut, and schedules as vLLM does.")
        return False
    step, decodes = scheduler.max_num_scheduled_tokens, config.max_num_seqs * (1 + scheduler.num_spec_tokens)
    if step < decodes + settings.grid:
        warn(
            f"A chunk of {settings.grid} tokens may not fit beside {decodes} of decodes in the {step} of a step: set "
            f"--max-num-batched-tokens to {decodes + settings.grid} at least."
        )
    return True


def index_selects(model_config: Any) -> int | None:
    """How many tokens each attends to in a model with an index, as `Cost.cap_tokens`; None without one."""
    return int(getattr(model_config.hf_text_config, "index_topk", 0) or 0) or None
