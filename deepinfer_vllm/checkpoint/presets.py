"""Named sizes for `deepinfer checkpoint`."""

from __future__ import annotations

from dataclasses import replace

from deepinfer_vllm.checkpoint.config import TextConfig
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError

MID = TextConfig(
    vocab_size=32768,
    hidden_size=1024,
    moe_intermediate_size=512,
    num_hidden_layers=16,
    num_attention_heads=16,
    head_dim=256,
    qk_rope_head_dim=32,
    q_lora_rank=256,
    o_lora_rank=256,
    max_position_embeddings=65536,
    rope_original_positions=4096,
    n_routed_experts=40,
    num_experts_per_tok=6,
    compress_ratios=(0, 0, *(2,) * 6, *(1,) * 8),
    kv_source_layer_ids=(2, 5, 8),
    index_source_layer_ids=(2, 5, 8, 12),
    index_head_dim=64,
    index_topk=256,
    candidate_source_layer_id=8,
    candidate_topk_blocks=1024,
    engram_layer_ids=(1, 5),
    engram_vocab_size=16384,
    engram_n_heads=4,
    engram_head_dim=64,
)
"""The release's proportions at a fifth of its width: 0.3 G of 1.2 G parameters are active for a token, half of the
layers lie past the last KV source, and everything that a long prompt switches on fits 65536 positions."""

PRESETS = {"tiny": TextConfig(num_nextn_predict_layers=3), "mid": MID}
FEWEST_LAYERS = 4


def preset(name: str, layers: int | None = None) -> TextConfig:
    """The preset of that name, with its topology stretched to `layers` where that is given."""
    if name not in PRESETS:
        raise CheckpointError(f"unknown preset {name!r}: choose from {', '.join(PRESETS)}")
    return PRESETS[name] if layers is None else with_layers(PRESETS[name], layers)


def with_layers(config: TextConfig, layers: int) -> TextConfig:
    """The released plan at another depth: two plain layers, ratio 2 up to the last KV source, ratio 1 from there on.

    The ratio-2 part has two KV sources, the ratio-1 part one (which also chooses candidate blocks) and an index
    source halfway.
    """
    if layers < FEWEST_LAYERS:
        raise CheckpointError(
            f"{layers} layers are too few: two plain ones and one of each ratio take at least {FEWEST_LAYERS}"
        )
    last_source = layers - max(1, layers * 3 // 8)
    pairs = last_source - 2
    kv_sources = sorted({2, 2 + (pairs + 1) // 2, last_source})
    later = last_source + (layers - last_source + 1) // 2
    index_sources = [*kv_sources, *([later] if later < layers else [])]
    return replace(
        config,
        num_hidden_layers=layers,
        compress_ratios=(0, 0, *(2,) * pairs, *(1,) * (layers - last_source)),
        kv_source_layer_ids=tuple(kv_sources),
        index_source_layer_ids=tuple(index_sources),
        candidate_source_layer_id=last_source,
        engram_layer_ids=(1, layers // 2),
    )
