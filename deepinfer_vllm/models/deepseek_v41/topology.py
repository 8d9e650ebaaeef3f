"""Which layer reads whose compressed rows, and what makes an assignment legal.

A compressed layer (ratio 1 or 2) attends to rows written by the latest KV source at or below it, at the positions
chosen by the latest index source at or below it. A KV source also writes the index keys, so it is an index source
itself. Index sources above the candidate source choose only inside its candidate blocks.
"""

from dataclasses import dataclass

from deepinfer_vllm.models.deepseek_v41.config import ConfigError, ModelConfig

LEGAL_RATIOS = (0, 1, 2)


@dataclass(frozen=True)
class LayerRole:
    """What one layer does in the sharing scheme. `kv_source` and `index_source` are -1 for window-only layers."""

    layer_id: int
    ratio: int
    kv_source: int
    index_source: int
    publishes_candidates: bool
    uses_candidates: bool

    @property
    def writes_rows(self) -> bool:
        """Whether this layer owns a compressor."""
        return self.ratio > 0 and self.kv_source == self.layer_id

    @property
    def selects(self) -> bool:
        """Whether this layer runs the indexer."""
        return self.ratio > 0 and self.index_source == self.layer_id


def layer_role(config: ModelConfig, layer_id: int) -> LayerRole:
    """The role of one layer of a checked config."""
    ratio = config.compress_ratios[layer_id]
    if ratio == 0:
        return LayerRole(layer_id, 0, -1, -1, False, False)
    index_source = max(s for s in config.index_sources if s <= layer_id)
    two_level = config.candidate_source >= 0 and config.candidate_blocks > 0
    return LayerRole(
        layer_id,
        ratio,
        max(s for s in config.kv_sources if s <= layer_id),
        index_source,
        publishes_candidates=two_level and layer_id == config.candidate_source,
        uses_candidates=two_level and layer_id == index_source and layer_id > config.candidate_source,
    )


def check(config: ModelConfig) -> None:
    """Raise `ConfigError` at the first field from which no model can be built."""
    _check_sizes(config)
    _check_sources(config)
    _check_candidates(config)
    _check_engram(config)
    _check_vision(config)


def _check_sizes(c: ModelConfig) -> None:
    _positive(c, "num_hidden_layers", c.num_layers)
    for field, value, divisor_field, divisor in (
        ("num_attention_heads", c.num_heads, "o_groups", c.o_groups),
        ("qk_rope_head_dim", c.rope_dim, "2 (rotation pairs)", 2),
    ):
        if divisor < 1 or value < 1 or value % divisor:
            raise ConfigError(field, value, f"must be a positive multiple of {divisor_field}={divisor}", _FIX)
    if c.rope_dim > c.head_dim:
        raise ConfigError("qk_rope_head_dim", c.rope_dim, f"must not exceed head_dim={c.head_dim}", _FIX)
    for field, size in (
        ("vocab_size", c.vocab_size),
        ("hidden_size", c.hidden_size),
        ("q_lora_rank", c.q_lora_rank),
        ("o_lora_rank", c.o_lora_rank),
        ("sliding_window", c.window),
        ("hc_mult", c.hc_mult),
        ("hc_sinkhorn_iters", c.hc_sinkhorn_iters),
        ("n_routed_experts", c.num_experts),
        ("moe_intermediate_size", c.moe_intermediate_size),
    ):
        _positive(c, field, size)
    if not 1 <= c.num_experts_per_token <= c.num_experts:
        limit = f"must lie in 1..n_routed_experts={c.num_experts}"
        raise ConfigError("num_experts_per_tok", c.num_experts_per_token, limit, _FIX)
    if c.scoring_func not in ("sqrtsoftplus", "sigmoid", "softmax"):
        raise ConfigError("scoring_func", c.scoring_func, "must be sqrtsoftplus, sigmoid or softmax", _FIX)


def _check_sources(c: ModelConfig) -> None:
    for layer_id, ratio in enumerate(c.compress_ratios):
        field = f"compress_ratios[{layer_id}]"
        if ratio not in LEGAL_RATIOS:
            raise ConfigError(field, ratio, "must be 0 (window only), 1 or 2", _FIX)
        if ratio == 0:
            continue
        for name, sources in (("kv_source_layer_ids", c.kv_sources), ("index_source_layer_ids", c.index_sources)):
            if not any(0 <= s <= layer_id for s in sources):
                remedy = f"Add a layer id at or below {layer_id} to {name}, or set the ratio to 0"
                raise ConfigError(field, ratio, f"a compressed layer needs a source in {name}={list(sources)}", remedy)
        source = max(s for s in c.kv_sources if s <= layer_id)
        if c.compress_ratios[source] != ratio:
            limit = f"must equal the ratio of its KV source, layer {source}: {c.compress_ratios[source]}"
            raise ConfigError(field, ratio, limit, "Make the group's ratios equal, or add a KV source")
    for name, sources in (("kv_source_layer_ids", c.kv_sources), ("index_source_layer_ids", c.index_sources)):
        for s in sources:
            if not 0 <= s < c.num_layers:
                raise ConfigError(name, s, f"must lie in 0..num_hidden_layers-1={c.num_layers - 1}", _FIX)
            if c.compress_ratios[s] == 0:
                raise ConfigError(name, s, "a source must be a compressed layer, but its ratio is 0", _FIX)
    for s in c.kv_sources:
        if s not in c.index_sources:
            limit = "a KV source also writes the index keys, so it must stand in index_source_layer_ids too"
            raise ConfigError("kv_source_layer_ids", s, limit, f"Add {s} to index_source_layer_ids")
    if c.index_sources:
        for field, value in (
            ("index_n_heads", c.index_heads),
            ("index_head_dim", c.index_head_dim),
            ("index_topk", c.index_topk),
        ):
            _positive(c, field, value)
        if c.rope_dim > c.index_head_dim:
            limit = f"must be at least qk_rope_head_dim={c.rope_dim}, which is rotated in it"
            raise ConfigError("index_head_dim", c.index_head_dim, limit, _FIX)


def _check_candidates(c: ModelConfig) -> None:
    source = c.candidate_source
    if source < 0 or c.candidate_blocks == 0:
        return
    if source not in c.index_sources:
        limit = f"must be one of index_source_layer_ids={list(c.index_sources)}, or negative to switch candidates off"
        raise ConfigError("candidate_source_layer_id", source, limit, _FIX)
    _positive(c, "candidate_topk_blocks", c.candidate_blocks)
    _positive(c, "candidate_block_size", c.candidate_block_size)
    for s in c.index_sources:
        if s > source and c.compress_ratios[s] != c.compress_ratios[source]:
            limit = f"index source {s} of ratio {c.compress_ratios[s]} would choose inside blocks of another ratio"
            raise ConfigError("candidate_source_layer_id", source, limit, "Move the candidate source above it")


def _check_engram(c: ModelConfig) -> None:
    e = c.engram
    if e is None:
        return
    if len(e.num_rows) != len(e.layer_ids):
        limit = f"needs one entry for each of engram_layer_ids={list(e.layer_ids)}"
        raise ConfigError("engram_num_embeddings", list(e.num_rows), limit, _FIX)
    for layer_id in e.layer_ids:
        if not 0 <= layer_id < c.num_layers:
            raise ConfigError("engram_layer_ids", layer_id, f"must lie in 0..{c.num_layers - 1}", _FIX)
    if e.max_ngram < 2:
        raise ConfigError("engram_max_ngram_size", e.max_ngram, "must be at least 2", _FIX)
    for field, value in (
        ("engram_n_heads", e.num_heads),
        ("engram_head_dim", e.head_dim),
        ("engram_vocab_size", e.vocab_size),
        ("engram_compressed_vocab_size", e.compressed_vocab_size),
    ):
        _positive(c, field, value)
    if not 0 <= e.pad_token_id < c.vocab_size:
        raise ConfigError("engram_pad_token_id", e.pad_token_id, f"must lie in 0..{c.vocab_size - 1}", _FIX)


def _check_vision(c: ModelConfig) -> None:
    v = c.vision
    if v is None:
        return
    if not 0 <= v.image_token_id < c.vocab_size:
        raise ConfigError("image_token_id", v.image_token_id, f"must lie in 0..{c.vocab_size - 1}", _FIX)
    for field, value, least in (
        ("num_hidden_layers", v.num_layers, 1),
        ("hidden_size", v.dim, 1),
        ("num_attention_heads", v.num_heads, 1),
        ("intermediate_size", v.inter_dim, 1),
        ("patch_size", v.patch_size, 1),
        ("downsample_ratio", v.downsample, 2),  # with 1, fitting a wide image into the limit may leave no row of it
        ("min_pixels", v.min_pixels, 0),
        ("max_image_tokens", v.max_tokens, 4),  # start, one patch, newline, end
    ):
        if value < least:
            raise ConfigError(f"vision_config.{field}", value, f"must be at least {least}", _FIX)
    if v.dim % (4 * v.num_heads):  # half a head is rotated by row and half by column, both in pairs
        limit = f"must be a multiple of 4 * num_attention_heads={4 * v.num_heads}"
        raise ConfigError("vision_config.hidden_size", v.dim, limit, _FIX)


def _positive(config: ModelConfig, field: str, value: int) -> None:
    if value < 1:
        raise ConfigError(field, value, "must be at least 1", _FIX)


_FIX = "Correct config.json"
