"""Every size and switch of a V4.1 model, read once from vLLM's flattened Hugging Face config."""

from dataclasses import dataclass
from typing import Any


class ConfigError(ValueError):
    """A field of config.json that V4.1 cannot be built from. The message names field, value, limit and remedy."""

    def __init__(self, field: str, value: object, limit: str, remedy: str) -> None:
        super().__init__(f"DeepSeek-V4.1 config: {field}={value!r}: {limit}. {remedy}.")


@dataclass(frozen=True)
class RopeConfig:
    """One rotary setting. `factor` 1 means plain RoPE; otherwise YaRN with its magnitude scale left at 1."""

    dim: int
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class EngramConfig:
    """N-gram memory: which layers carry it, the table rows of each, and how n-grams are hashed."""

    layer_ids: tuple[int, ...]
    num_rows: tuple[int, ...]
    vocab_size: int
    max_ngram: int
    num_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def num_columns(self) -> int:
        """Table rows read per token and layer."""
        return (self.max_ngram - 1) * self.num_heads


@dataclass(frozen=True)
class VisionConfig:
    """The sizes of tower and aligner, and the token id that every place of an image carries."""

    image_token_id: int
    num_layers: int
    dim: int
    num_heads: int
    inter_dim: int
    patch_size: int
    downsample: int
    max_tokens: int
    min_pixels: int

    ROUTED_IDS = 5
    """The router takes this many ids, from `image_token_id` on, for images'; the release uses the first alone."""


@dataclass(frozen=True)
class ModelConfig:
    """The model's configuration. Built by `from_hf`; legality across fields is `topology.check`'s."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    norm_eps: float
    window: int
    max_positions: int
    compress_ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source: int
    candidate_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    swiglu_limit: float
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    gate_temp: float
    has_gate_bias: bool
    main_rope: RopeConfig
    compress_rope: RopeConfig
    engram: EngramConfig | None
    vision: VisionConfig | None

    @classmethod
    def from_hf(cls, hf: Any) -> "ModelConfig":
        """Read vLLM's `DeepseekV41Config`, whose text fields stand flattened on the top level."""
        layers = int(_need(hf, "num_hidden_layers"))
        ratios = tuple(int(r) for r in getattr(hf, "compress_ratios", None) or ())[:layers]
        main, compress = _ropes(hf)
        candidate_source = getattr(hf, "candidate_source_layer_id", -1)
        return cls(
            vocab_size=int(_need(hf, "vocab_size")),
            hidden_size=int(_need(hf, "hidden_size")),
            num_layers=layers,
            num_heads=int(_need(hf, "num_attention_heads")),
            head_dim=int(_need(hf, "head_dim")),
            rope_dim=int(_need(hf, "qk_rope_head_dim")),
            q_lora_rank=int(_need(hf, "q_lora_rank")),
            o_lora_rank=int(_need(hf, "o_lora_rank")),
            o_groups=int(_need(hf, "o_groups")),
            norm_eps=float(_need(hf, "rms_norm_eps")),
            window=int(_need(hf, "sliding_window")),
            max_positions=int(_need(hf, "max_position_embeddings")),
            compress_ratios=ratios + (0,) * (layers - len(ratios)),
            kv_sources=_ids(hf, "kv_source_layer_ids"),
            index_sources=_ids(hf, "index_source_layer_ids"),
            index_heads=int(getattr(hf, "index_n_heads", 0) or 0),
            index_head_dim=int(getattr(hf, "index_head_dim", 0) or 0),
            index_topk=int(getattr(hf, "index_topk", 0) or 0),
            candidate_source=-1 if candidate_source is None else int(candidate_source),
            candidate_blocks=int(getattr(hf, "candidate_topk_blocks", 0) or 0),
            candidate_block_size=int(getattr(hf, "candidate_block_size", 0) or 0),
            hc_mult=int(_need(hf, "hc_mult")),
            hc_sinkhorn_iters=int(_need(hf, "hc_sinkhorn_iters")),
            hc_eps=float(_need(hf, "hc_eps")),
            num_experts=int(_need(hf, "n_routed_experts")),
            num_experts_per_token=int(_need(hf, "num_experts_per_tok")),
            num_shared_experts=int(getattr(hf, "n_shared_experts", 1) or 0),
            moe_intermediate_size=int(_need(hf, "moe_intermediate_size")),
            swiglu_limit=float(getattr(hf, "swiglu_limit", 0.0) or 0.0),
            scoring_func=str(getattr(hf, "scoring_func", "sqrtsoftplus")),
            norm_topk_prob=bool(getattr(hf, "norm_topk_prob", True)),
            routed_scaling_factor=float(getattr(hf, "routed_scaling_factor", 1.0)),
            gate_temp=float(getattr(hf, "gate_temp", 1.0) or 1.0),
            has_gate_bias=getattr(hf, "topk_method", None) == "noaux_tc",
            main_rope=main,
            compress_rope=compress,
            engram=_engram(hf),
            vision=_vision(hf),
        )

    @property
    def replay_cut(self) -> int:
        """The last KV source: layers above it only read compressed rows written at or below it. -1 without one."""
        return max(self.kv_sources, default=-1)


def _need(hf: Any, field: str) -> Any:
    value = getattr(hf, field, None)
    if value is None:
        raise ConfigError(field, value, "the field is required", "Add it to text_config in config.json")
    return value


def _ids(hf: Any, field: str) -> tuple[int, ...]:
    return tuple(sorted(int(i) for i in getattr(hf, field, None) or ()))


def _ropes(hf: Any) -> tuple[RopeConfig, RopeConfig]:
    """Sliding-window layers: plain RoPE; compressed layers: their own theta and, where given, YaRN."""
    dim = int(_need(hf, "qk_rope_head_dim"))
    main = RopeConfig(dim, float(getattr(hf, "rope_theta", None) or 1e4))
    scaling = getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    scaling = scaling.get("compress", scaling)
    theta = float(getattr(hf, "compress_rope_theta", None) or scaling.get("rope_theta") or main.theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return main, RopeConfig(dim, theta)
    if kind not in ("yarn", "deepseek_yarn"):
        raise ConfigError("rope_scaling.rope_type", kind, "must be default or yarn", "Correct config.json")
    for field in ("factor", "original_max_position_embeddings"):
        if not scaling.get(field):
            raise ConfigError(f"rope_scaling.{field}", scaling.get(field), "YaRN needs it", "Add it to config.json")
    return main, RopeConfig(
        dim,
        theta,
        float(scaling["factor"]),
        int(scaling["original_max_position_embeddings"]),
        float(scaling.get("beta_fast") or 32.0),
        float(scaling.get("beta_slow") or 1.0),
    )


def _engram(hf: Any) -> EngramConfig | None:
    layer_ids = tuple(int(i) for i in getattr(hf, "engram_layer_ids", None) or ())
    if not layer_ids:
        return None
    pad = getattr(hf, "engram_pad_token_id", None)
    return EngramConfig(
        layer_ids=layer_ids,
        num_rows=tuple(int(n) for n in _need(hf, "engram_num_embeddings")),
        vocab_size=int(_need(hf, "engram_vocab_size")),
        max_ngram=int(_need(hf, "engram_max_ngram_size")),
        num_heads=int(_need(hf, "engram_n_heads")),
        head_dim=int(_need(hf, "engram_head_dim")),
        pad_token_id=int(getattr(hf, "engram_pad_id", 2) if pad is None else pad),
        compressed_vocab_size=int(_need(hf, "engram_compressed_vocab_size")),
    )


def _vision(hf: Any) -> VisionConfig | None:
    if not getattr(hf, "vision_n_layers", 0):
        return None
    return VisionConfig(
        image_token_id=int(_need(hf, "image_token_id")),
        num_layers=int(hf.vision_n_layers),
        dim=int(hf.vision_dim),
        num_heads=int(hf.vision_n_heads),
        inter_dim=int(hf.vision_inter_dim),
        patch_size=int(hf.vision_patch_size),
        downsample=int(hf.vision_downsample_ratio),
        max_tokens=int(hf.vision_max_n_token),
        min_pixels=int(hf.vision_min_pixels),
    )
