"""What vllm-ascend's notes on V4.1 ask for, where the user has said nothing.

vLLM calls the platform while what nobody set is still None (`cudagraph_mode`, the drafts' `enforce_eager`) or marked as
not given (`block_size`).
"""

import logging
from typing import Any

from deepinfer_vllm.platforms.engine_facts import Implementation

BLOCK_TOKENS = 128

logger = logging.getLogger("vllm.deepinfer")


def fill_unset(vllm_config: Any, implementation: Implementation) -> None:
    """Set what is unset of a V4.1 engine, and say so."""
    from vllm.config import CUDAGraphMode

    cache, compilation = vllm_config.cache_config, vllm_config.compilation_config
    speculation = vllm_config.speculative_config
    filled = []
    if not cache.user_specified_block_size and cache.block_size != BLOCK_TOKENS:
        cache.block_size = BLOCK_TOKENS
        filled.append(f"block_size={BLOCK_TOKENS}")
    if compilation.cudagraph_mode is None:
        # The portable model reads lengths on the host in every step, which no graph can record.
        portable = implementation is Implementation.PORTABLE
        compilation.cudagraph_mode = CUDAGraphMode.NONE if portable else CUDAGraphMode.FULL_DECODE_ONLY
        filled.append(f"cudagraph_mode={compilation.cudagraph_mode.name}")
    if speculation is not None and speculation.enforce_eager is None:
        speculation.enforce_eager = True
        filled.append("enforce_eager=True for drafts")
    if filled:
        logger.info("DeepSeek-V4.1 on Ascend: %s, which nobody had set.", ", ".join(filled))
