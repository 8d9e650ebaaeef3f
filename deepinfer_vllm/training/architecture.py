"""The trained pair's configuration: every part of V4.1 in a few million operations a token."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from deepinfer_vllm.checkpoint.config import TextConfig
from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.dspark_config import DraftConfig

TRAINED = TextConfig(
    vocab_size=512,
    hidden_size=80,
    moe_intermediate_size=32,
    num_hidden_layers=8,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=48,
    o_lora_rank=24,
    o_groups=2,
    max_position_embeddings=8192,
    n_routed_experts=6,
    num_experts_per_tok=2,
    sliding_window=32,
    compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1),
    kv_source_layer_ids=(2, 5),
    index_source_layer_ids=(2, 5, 7),
    index_n_heads=8,
    index_head_dim=16,
    index_topk=16,
    candidate_source_layer_id=5,
    candidate_topk_blocks=12,
    hc_sinkhorn_iters=8,
    engram_layer_ids=(1, 4),
    engram_vocab_size=384,
    engram_head_dim=16,
    num_nextn_predict_layers=2,
)
"""Windows are short: what a text repeats from far above can only come from compressed rows."""


@dataclass(frozen=True)
class Architecture:
    """The published config and what the model's own readers make of it."""

    published: dict[str, Any]
    target: ModelConfig
    draft: DraftConfig
    noise_token: int
    block_size: int

    @classmethod
    def read(cls, published: dict[str, Any]) -> Architecture:
        """Raises ConfigError where the model would."""
        text = SimpleNamespace(**published["text_config"])
        return cls(
            published,
            ModelConfig.from_hf(text),
            DraftConfig.from_hf(text),
            text.dspark_noise_token_id,
            text.dspark_block_size,
        )


def trained_architecture(dtype: str = "float32") -> Architecture:
    """The shipped pair's, its weights of that dtype."""
    return Architecture.read(TRAINED.published(dtype))
