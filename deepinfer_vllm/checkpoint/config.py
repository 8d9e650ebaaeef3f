"""The configuration in its published form, with the sizes of the tiny preset as defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from deepinfer_vllm.checkpoint.special_tokens import IMAGE, SYSTEM
from deepinfer_vllm.checkpoint.tokenizer import build_tokenizer, token_id
from deepinfer_vllm.checkpoint.vision import TEXT_ONLY, VisionConfig


@dataclass(frozen=True)
class TextConfig:
    """Fields of `text_config`, by their published names. What follows from others is added by `published`."""

    vocab_size: int = 1024
    hidden_size: int = 128
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    head_dim: int = 64
    qk_rope_head_dim: int = 16
    q_lora_rank: int = 64
    o_lora_rank: int = 32
    o_groups: int = 4
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    max_position_embeddings: int = 8192
    rope_theta: float = 10000
    compress_rope_theta: float = 160000
    rope_factor: float = 16
    rope_original_positions: int = 512
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    gate_temp: float | None = None  # absent in the release, which means 1
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, 2, 2, 2, 1, 1, 1)
    kv_source_layer_ids: tuple[int, ...] = (2, 4, 5)
    index_source_layer_ids: tuple[int, ...] = (2, 4, 5, 7)
    index_n_heads: int = 16
    index_head_dim: int = 32
    index_topk: int = 64
    candidate_source_layer_id: int = 5
    candidate_topk_blocks: int = 32
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1, 4)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 128
    engram_n_heads: int = 2
    engram_head_dim: int = 32
    engram_pad_token_id: int = 2
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_markov_rank: int = 32
    dspark_n_routed_experts: int = 4
    dspark_num_experts_per_tok: int = 2
    extra: dict[str, Any] = field(default_factory=dict)  # further keys of `text_config`

    def published(self, dtype: str = "bfloat16", vision: VisionConfig | None = None) -> dict[str, Any]:
        """The whole `config.json`, of a text model or, with `vision`, of one that sees.

        Trains the tokenizer of this vocabulary, on which Engram's sizes depend.
        """
        from deepinfer_vllm.models.deepseek_v41.engram_hash import compressed_vocabulary

        tokenizer = build_tokenizer(self.vocab_size)
        _, classes = compressed_vocabulary(tokenizer, self.vocab_size)
        return {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": dtype,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "image_token_id": token_id(tokenizer, IMAGE),
            "tie_word_embeddings": False,
            "text_config": self._text(classes, token_id(tokenizer, SYSTEM)),
            "vision_config": dict(TEXT_ONLY) if vision is None else vision.published(),
        }

    def _text(self, compressed_vocabulary: int, noise_token: int) -> dict[str, Any]:
        from deepinfer_vllm.models.deepseek_v41.engram_hash import table_primes

        own: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        extra, factor, original = own.pop("extra"), own.pop("rope_factor"), own.pop("rope_original_positions")
        if own["gate_temp"] is None:
            del own["gate_temp"]
        primes = table_primes(
            len(self.engram_layer_ids), self.engram_vocab_size, self.engram_max_ngram_size, self.engram_n_heads
        )
        layers = self.num_hidden_layers
        return {
            "model_type": "deepseek_v41_text",
            **own,
            "num_key_value_heads": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "tie_word_embeddings": False,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": factor,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": original,
            },
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "engram_num_embeddings": [sum(map(sum, layer)) for layer in primes],
            "engram_compressed_vocab_size": compressed_vocabulary,
            "dspark_noise_token_id": noise_token,
            "dspark_target_layer_ids": list(range(max(0, layers - 3), layers)),
            **extra,
        }
