"""A small V4.1 and its parts, made by hand: configs, filled modules, caches in scattered blocks, steps."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from deepinfer_vllm.checkpoint.config import TextConfig
from deepinfer_vllm.checkpoint.vision import VisionConfig
from deepinfer_vllm.models.deepseek_v41.cache import PagedCache
from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.step import Step
from reference import Config

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 12,
    "o_lora_rank": 8,
    "o_groups": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_factor": 4,
    "rope_original_positions": 64,
    "sliding_window": 7,
    "compress_ratios": (0, 2, 1, 1, 1),
    "kv_source_layer_ids": (1, 2),
    "index_source_layer_ids": (1, 2, 3),
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 6,
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "engram_layer_ids": (0, 4),
    "engram_vocab_size": 40,
    "engram_head_dim": 8,
}


@functools.cache
def _published() -> dict[str, Any]:
    return TextConfig(**SIZES).published("float32")


def published(*, vision: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The config.json of the small model with fields of text_config replaced; None takes a field away.

    `vision`: fields of vision_config, for a model that sees.
    """
    config = copy.deepcopy(_published())
    if vision is not None:
        config["vision_config"] = {**VisionConfig().published(), **vision}
    config["text_config"].update(changes)
    for field in [field for field, value in changes.items() if value is None]:
        del config["text_config"][field]
    return config


def hf_config(**changes: Any) -> Any:
    """The same as vLLM hands it to the model: text fields flattened onto the top level."""
    from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

    return DeepseekV41Config(**published(**changes))


def both_configs(**changes: Any) -> tuple[ModelConfig, Config]:
    """The small model's config as the model and as the reference read it."""
    return ModelConfig.from_hf(hf_config(**changes)), Config.from_dict(published(**changes))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed))


def fill(module: nn.Module, seed: int, prefix: str = "") -> dict[str, torch.Tensor]:
    """Draw every parameter; the values in float64 under `prefix` + name, as the reference wants them."""
    drawn = generator(seed)
    weights = {}
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=drawn)
        if parameter.dim() > 1:
            values *= parameter.shape[-1] ** -0.5
        parameter.data.copy_(values)
        weights[f"{prefix}{name}"] = parameter.data.double()
    for part in module.modules():
        method = getattr(part, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(part)
    return weights


def bind(cache: PagedCache, blocks: int, fill_value: float = 0.0) -> None:
    """Give a cache memory of its own."""
    spec: Any = cache.spec
    cache.bind_kv_cache(torch.full((blocks, 1, cache.rows_per_block, spec.head_size), fill_value, dtype=spec.dtype))


def scattered(requests: int, blocks: int, seed: int = 0) -> torch.Tensor:
    """A block table [requests, blocks] int32 whose blocks lie in no order; block 0 belongs to nobody."""
    order = torch.randperm(requests * blocks, generator=generator(seed)) + 1
    return order.view(requests, blocks).int()


def make_step(ranges: list[tuple[int, int]], tables: dict[str, torch.Tensor]) -> Step:
    """A step in which request i computes positions ranges[i]."""
    lengths = [end - start for start, end in ranges]
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return Step(
        positions=torch.cat([torch.arange(start, end) for start, end in ranges]),
        request=torch.repeat_interleave(torch.arange(len(ranges)), torch.tensor(lengths)),
        spans=list(zip(bounds[:-1], bounds[1:], strict=True)),
        seq_lens=[end for _, end in ranges],
        tables=tables,
    )
