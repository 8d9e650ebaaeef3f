"""The draft layers' configuration: what DSpark adds to the text model's, and where its layers differ."""

from dataclasses import dataclass, replace
from typing import Any

from deepinfer_vllm.models.deepseek_v41.config import ConfigError, ModelConfig
from deepinfer_vllm.models.deepseek_v41.topology import LayerRole, check

WINDOW_ONLY = LayerRole(-1, 0, -1, -1, False, False)
"""What a draft layer does in the sharing scheme: nothing. It has no compressed rows."""

_FIX = "Correct config.json"


@dataclass(frozen=True)
class DraftConfig:
    """A draft model of `num_layers` layers that reads the target's states at the entry of `target_layers`."""

    model: ModelConfig
    """Sizes of its layers: the target's, with experts of its own number."""
    num_layers: int
    target_layers: tuple[int, ...]
    markov_rank: int
    has_confidence: bool

    @classmethod
    def from_hf(cls, hf: Any) -> "DraftConfig":
        """Read vLLM's `DeepseekV41Config`. Raises ConfigError at the first field that fits no draft model."""
        target = ModelConfig.from_hf(hf)
        check(target)
        num_layers = int(getattr(hf, "n_mtp_layers", None) or getattr(hf, "num_nextn_predict_layers", None) or 0)
        if num_layers < 1:
            remedy = "Use a checkpoint with draft layers (mtp.*), or leave --speculative-config away"
            raise ConfigError("num_nextn_predict_layers", num_layers, "DSpark needs at least one draft layer", remedy)
        layers = tuple(int(i) for i in getattr(hf, "dspark_target_layer_ids", None) or ())
        if not layers or list(layers) != sorted({*layers} & {*range(target.num_layers)}):
            limit = f"must be layers of 0..num_hidden_layers-1={target.num_layers - 1} in ascending order"
            raise ConfigError("dspark_target_layer_ids", list(layers), limit, _FIX)
        rank = int(getattr(hf, "dspark_markov_rank", None) or 0)
        if rank < 1:
            raise ConfigError("dspark_markov_rank", rank, "must be at least 1", _FIX)
        vocabulary = getattr(hf, "draft_vocab_size", None) or target.vocab_size
        if vocabulary != target.vocab_size:
            limit = f"must be vocab_size={target.vocab_size}: V4.1's draft layers share the target's head"
            raise ConfigError("draft_vocab_size", vocabulary, limit, _FIX)
        noise = getattr(hf, "dspark_noise_token_id", None)
        if noise is None or not 0 <= noise < target.vocab_size:
            raise ConfigError("dspark_noise_token_id", noise, f"must lie in 0..{target.vocab_size - 1}", _FIX)
        experts = int(getattr(hf, "dspark_n_routed_experts", None) or target.num_experts)
        chosen = int(getattr(hf, "dspark_num_experts_per_tok", None) or target.num_experts_per_token)
        if not 1 <= chosen <= experts:
            limit = f"must lie in 1..dspark_n_routed_experts={experts}"
            raise ConfigError("dspark_num_experts_per_tok", chosen, limit, _FIX)
        return cls(
            model=replace(target, num_experts=experts, num_experts_per_token=chosen),
            num_layers=num_layers,
            target_layers=layers,
            markov_rank=rank,
            has_confidence=bool(getattr(hf, "enable_confidence_head", True)),
        )


def speculation_problems(vllm_config: Any) -> list[str]:
    """What speaks against the speculative decoding asked for. Raises ConfigError where config.json fits no draft."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return []
    if speculative.method != "dspark":
        return [f'--speculative-config method={speculative.method} (must be "dspark", whose layers the checkpoint has)']
    window = DraftConfig.from_hf(speculative.draft_model_config.hf_config).model.window
    drafts = speculative.num_speculative_tokens
    own_model = speculative.model not in (None, vllm_config.model_config.model)
    judge, dtype = speculative.rejection_sample_method, speculative.kv_cache_dtype
    ranks = vllm_config.parallel_config.data_parallel_size
    return [
        f"{setting} (must be {allowed} with --speculative-config)"
        for setting, allowed, bad in (
            ("VLLM_USE_V2_MODEL_RUNNER=0", "1 or unset", not vllm_config.use_v2_model_runner),
            (f"model={speculative.model} in --speculative-config", "left away", own_model),
            (f"rejection_sample_method={judge}", "standard, block or synthetic", judge == "fly"),
            (f"kv_cache_dtype={dtype} in --speculative-config", "left away", dtype not in (None, "auto")),
            ("use_local_argmax_reduction", "left away", speculative.use_local_argmax_reduction),
            (f"num_speculative_tokens={drafts}", f"below sliding_window={window}", drafts >= window),
            (f"--data-parallel-size={ranks}", "1", ranks > 1),
        )
        if bad
    ]
