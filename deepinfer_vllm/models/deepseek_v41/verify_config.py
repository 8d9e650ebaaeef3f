"""What vLLM asks of a V4.1 model before any worker starts: can this checkpoint, and this engine, run it?"""

import logging
from pathlib import Path
from typing import Any

from deepinfer_vllm import compat, envs
from deepinfer_vllm.models.deepseek_v41.config import ConfigError, ModelConfig
from deepinfer_vllm.models.deepseek_v41.dspark_config import speculation_problems
from deepinfer_vllm.models.deepseek_v41.engram_hash import hash_layouts
from deepinfer_vllm.models.deepseek_v41.engram_table import open_tables
from deepinfer_vllm.models.deepseek_v41.quantised_matrix import BLOCK
from deepinfer_vllm.models.deepseek_v41.quantised_shards import check_quantised
from deepinfer_vllm.models.deepseek_v41.topology import check
from deepinfer_vllm.models.deepseek_v41.verify_parallel import problems as parallel_problems
from deepinfer_vllm.models.deepseek_v41.weights import checkpoint_directory
from deepinfer_vllm.native import invariance
from deepinfer_vllm.platforms import v41_problems

NEEDS_TOKEN_IDS = (
    "This DeepSeek-V4.1 has Engram layers, which hash token ids; prompt embeddings have none. Send text or token ids"
)

logger = logging.getLogger("vllm.deepinfer")


def verify_model(model_config: Any) -> None:
    """Check config.json, the shards and the Engram tables beside it; take the model out of vLLM's generic MLA handling.

    Raises ConfigError or CheckpointError, and ValueError for an environment variable of ours.
    """
    envs.check()
    hf = model_config.hf_config
    _take_over_quantisation(model_config)
    config = ModelConfig.from_hf(hf)
    check(config)
    check_quantised(Path(model_config.model))  # nothing is found in what is not a directory
    if config.engram is not None:
        hash_layouts(config.engram)
        open_tables(config, checkpoint_directory(model_config.model, model_config.revision))
        if model_config.enable_prompt_embeds:
            logger.warning("--enable-prompt-embeds has no effect. %s", NEEDS_TOKEN_IDS)
            model_config.enable_prompt_embeds = False
        model_config.deepinfer_needs_token_ids = True
        compat.refuse_prompt_embeds(NEEDS_TOKEN_IDS)
    if config.vision is not None:
        compat.blame_the_sender()
    compat.refuse_what_workers_cannot_hold()
    # Taken for generic MLA, the CPU platform would force blocks of 16 and no prefix caching or chunked prefill.
    model_config.model_arch_config.is_deepseek_mla = False


def _take_over_quantisation(model_config: Any) -> None:
    """`WeightStorage` reads the published format, so vLLM must see a plain checkpoint."""
    if model_config.quantization is not None:
        raise ValueError(
            f"The portable DeepSeek-V4.1 cannot run with --quantization={model_config.quantization} (must be unset): "
            "the checkpoint says how weights are quantised, DEEPINFER_VLLM_WEIGHTS how they are held"
        )
    hf = model_config.hf_config
    quantisation = getattr(hf, "quantization_config", None)
    if not quantisation:
        return
    for field, published in (("quant_method", "fp8"), ("weight_block_size", [BLOCK, BLOCK]), ("scale_fmt", "ue8m0")):
        if quantisation.get(field) != published:
            raise ConfigError(
                f"quantization_config.{field}",
                quantisation.get(field),
                f"the portable model reads the published format only, {field}={published!r}",
                "Convert the checkpoint to bf16, or run it on CUDA or ROCm with vLLM's own model",
            )
    del hf.quantization_config
    model_config.model_arch_config.quantization_config = None


def verify_engine(vllm_config: Any) -> None:
    """Refuse what the portable model does not do, or the platform, naming the flag. Raises ValueError."""
    config, cache = ModelConfig.from_hf(vllm_config.model_config.hf_config), vllm_config.cache_config
    images = vllm_config.model_config.multimodal_config
    hybrid_off = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    problems = parallel_problems(config, vllm_config.parallel_config) + [
        f"{flag}={value} (must be {allowed})"
        for flag, value, allowed, bad in (
            ("--kv-cache-dtype", cache.cache_dtype, "auto", cache.cache_dtype not in ("auto", "float32", "bfloat16")),
            ("--block-size", cache.block_size, "even", bool(cache.block_size and cache.block_size % 2)),
            # vLLM (0.32, 0.33) cannot turn window specs of MLA rows into full ones.
            ("--disable-hybrid-kv-cache-manager", True, "off", hybrid_off is True),
            ("--enable-mm-embeds", True, "off", images.enable_mm_embeds),
            ("--mm-encoder-only", True, "off", images.mm_encoder_only),
            ("--enable-lora", True, "off", vllm_config.lora_config is not None),
        )
        if bad
    ]
    problems += speculation_problems(vllm_config) + _invariance_problems(vllm_config) + v41_problems(vllm_config)
    if problems:
        raise ValueError(f"The portable DeepSeek-V4.1 cannot run with {', '.join(problems)}. Change these")


def _invariance_problems(vllm_config: Any) -> list[str]:
    """Of VLLM_BATCH_INVARIANT=1. Said is what works, but not as on a CPU with a compiler."""
    from vllm.platforms import current_platform

    way, parallel = invariance.way(), vllm_config.parallel_config
    drafts = vllm_config.speculative_config is not None
    if way is invariance.Way.TOKENS:
        logger.warning(
            "VLLM_BATCH_INVARIANT=1 computes one token at a time here: only on a CPU with a C compiler, and without "
            "DEEPINFER_VLLM_NATIVE=0, are many computed together"
        )
    if way.value and drafts and not current_platform.is_cpu():
        logger.warning(
            "VLLM_BATCH_INVARIANT=1 with drafts on %s: vLLM's kernels judge them, so answers are the same in any batch "
            "at temperature 0 only; without --speculative-config they are at any",
            current_platform.device_type,
        )
    return [
        f"{flag}={value} (must be {allowed} under VLLM_BATCH_INVARIANT=1)"
        for flag, value, allowed, bad in (
            ("--enable-eplb", True, "off", bool(way.value) and parallel.enable_eplb),
            # Drafts are judged by noise in float32, which must be the noise of sampling.
            (
                "--use-fp64-gumbel",
                True,
                "off with drafts",
                bool(way.value) and drafts and vllm_config.model_config.use_fp64_gumbel,
            ),
            (
                "--data-parallel-size",
                parallel.data_parallel_size,
                "1 without compiled kernels",
                way is invariance.Way.TOKENS and parallel.data_parallel_size > 1,
            ),
        )
        if bad
    ]
