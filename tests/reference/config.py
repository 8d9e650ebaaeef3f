"""The sizes and the layer topology that the reference reads from a published `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Config:
    """Text-model part of `config.json`, field names as published. `from_dict` fills every field."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: dict[str, Any]
    sliding_window: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    compress_ratios: tuple[int, ...] = ()
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 0
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    topk_method: str | None = None
    gate_temp: float = 1.0
    swiglu_limit: float = 0.0
    image_token_id: int = -1  # -1: a checkpoint without a vision tower, in which every id is text

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Config:
        """Take the fields from `raw["text_config"]` or, when that is absent, from `raw` itself."""
        text = {**raw, **raw.get("text_config", {})}
        known = {f.name for f in fields(cls)}
        if not raw.get("vision_config", {}).get("num_hidden_layers"):
            known.discard("image_token_id")
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in text.items() if k in known and v is not None}
        return cls(**values)

    @classmethod
    def read(cls, directory: Path) -> Config:
        return cls.from_dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))

    def ratio(self, layer: int) -> int:
        """Compression ratio of a layer; layers past the end of the list have none."""
        return self.compress_ratios[layer] if layer < len(self.compress_ratios) else 0

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed rows `layer` attends to: the latest KV source at or below it."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose row selection `layer` uses: the latest index source at or below it."""
        return max(source for source in self.index_source_layer_ids if source <= layer)

    def is_masked_by_candidates(self, layer: int) -> bool:
        """Index sources after the candidate source choose only rows inside its candidate blocks."""
        return 0 <= self.candidate_source_layer_id < layer
