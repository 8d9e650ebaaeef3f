"""Names, shapes and initial distributions of a checkpoint's tensors, in the published naming."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepinfer_vllm.checkpoint.tensor_spec import TensorSpec
from deepinfer_vllm.checkpoint.vision import vision_specs


def tensor_specs(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """All tensors of a published config (the nested dict of `config.json`).

    Standard deviations are chosen so that logits spread by about 4 and no part of the model is without effect.
    """
    text = config["text_config"]
    hidden, vocabulary = text["hidden_size"], text["vocab_size"]
    yield TensorSpec("embed.weight", (vocabulary, hidden), 1.5)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"layers.{layer}"
        yield from _layer(prefix, text)
        if layer in text["kv_source_layer_ids"]:
            yield from _kv_source(f"{prefix}.attn", text, text["compress_ratios"][layer])
        if layer in text["index_source_layer_ids"]:
            yield from _index_source(f"{prefix}.attn.indexer", text)
        yield from _experts(f"{prefix}.ffn", text, text["n_routed_experts"])
        if layer in text["engram_layer_ids"]:
            rows = text["engram_num_embeddings"][text["engram_layer_ids"].index(layer)]
            yield from _engram(f"{prefix}.engram", text, rows)
    yield _norm("norm", hidden)
    yield TensorSpec("head.weight", (vocabulary, hidden), 4 * hidden**-0.5)
    yield from _draft(text)
    yield from vision_specs(config)


def _layer(prefix: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """What every layer has, but for its experts."""
    yield _norm(f"{prefix}.attn_norm", text["hidden_size"])
    yield _norm(f"{prefix}.ffn_norm", text["hidden_size"])
    yield from _hyper_connections(prefix, text)
    yield from _attention(f"{prefix}.attn", text)


def _draft(text: dict[str, Any]) -> Iterator[TensorSpec]:
    """DSpark's layers. The first also carries the projection of the target's states, the last the heads."""
    hidden, vocabulary, layers = text["hidden_size"], text["vocab_size"], text["num_nextn_predict_layers"]
    if not layers:
        return
    yield _linear("mtp.0.main_proj", hidden, hidden * len(text["dspark_target_layer_ids"]))
    yield _norm("mtp.0.main_norm", hidden)
    for layer in range(layers):
        yield from _layer(f"mtp.{layer}", text)
        yield from _experts(f"mtp.{layer}.ffn", text, text["dspark_n_routed_experts"])
    last, rank = f"mtp.{layers - 1}", text["dspark_markov_rank"]
    yield _norm(f"{last}.norm", hidden)
    yield TensorSpec(f"{last}.markov_head.embed.weight", (vocabulary, rank), 1.0)
    yield _linear(f"{last}.markov_head.head", vocabulary, rank, gain=2.0)
    yield _linear(f"{last}.confidence_head.proj", 1, hidden + rank)


def _norm(name: str, size: int) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (size,), 0.25, mean=1.0)


def _linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (outputs, inputs), gain * inputs**-0.5)


def _hyper_connections(prefix: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    streams = text["hc_mult"]
    mixes, inputs = (2 + streams) * streams, streams * text["hidden_size"]
    for part in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}.hc_{part}_fn", (mixes, inputs), inputs**-0.5, is_float32=True)
        yield TensorSpec(f"{prefix}.hc_{part}_base", (mixes,), 1.5, is_float32=True)
        yield TensorSpec(f"{prefix}.hc_{part}_scale", (3,), 0.2, mean=1.0, is_float32=True)


def _attention(prefix: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden, heads, dim = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    rank, groups = text["o_lora_rank"], text["o_groups"]
    yield _linear(f"{prefix}.wq_a", text["q_lora_rank"], hidden)
    yield _norm(f"{prefix}.q_norm", text["q_lora_rank"])
    yield _linear(f"{prefix}.wq_b", heads * dim, text["q_lora_rank"], gain=1.4)
    yield _linear(f"{prefix}.wkv", dim, hidden)
    yield _norm(f"{prefix}.kv_norm", dim)
    yield TensorSpec(f"{prefix}.attn_sink", (heads,), 1.0, mean=0.5, is_float32=True)
    yield _linear(f"{prefix}.wo_a", groups * rank, heads * dim // groups)
    yield _linear(f"{prefix}.wo_b", hidden, groups * rank)


def _kv_source(prefix: str, text: dict[str, Any], ratio: int) -> Iterator[TensorSpec]:
    dim, index_dim, hidden = text["head_dim"], text["index_head_dim"], text["hidden_size"]
    yield _linear(f"{prefix}.compressor.wkv", dim, hidden)
    if ratio == 2:
        yield _linear(f"{prefix}.compressor.wgate", dim, hidden, gain=1.5)
    yield _norm(f"{prefix}.compressor.norm", dim)
    yield _linear(f"{prefix}.indexer.wk", index_dim, dim)
    yield _norm(f"{prefix}.indexer.k_norm", index_dim)


def _index_source(prefix: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    heads, dim = text["index_n_heads"], text["index_head_dim"]
    yield _linear(f"{prefix}.wq_b", heads * dim, text["q_lora_rank"])
    yield _linear(f"{prefix}.weights_proj", heads, text["hidden_size"])


def _experts(prefix: str, text: dict[str, Any], count: int) -> Iterator[TensorSpec]:
    hidden, inner = text["hidden_size"], text["moe_intermediate_size"]
    yield _linear(f"{prefix}.gate", count, hidden, gain=1.5)
    yield TensorSpec(f"{prefix}.gate.bias", (count,), 0.25, is_float32=True)
    yield TensorSpec(f"{prefix}.gate.bias_vl", (count,), 0.25, is_float32=True)
    experts = [f"{prefix}.experts.{i}" for i in range(count)]
    if text["n_shared_experts"]:
        experts.append(f"{prefix}.shared_experts")
    for expert in experts:
        width = inner * text["n_shared_experts"] if expert.endswith("shared_experts") else inner
        yield _linear(f"{expert}.w1", width, hidden, gain=2.0)
        yield _linear(f"{expert}.w3", width, hidden, gain=2.0)
        yield _linear(f"{expert}.w2", hidden, width, gain=0.5)


def _engram(prefix: str, text: dict[str, Any], rows: int) -> Iterator[TensorSpec]:
    dim, hidden, streams = text["engram_head_dim"], text["hidden_size"], text["hc_mult"]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    yield TensorSpec(f"{prefix}.embed.weight", (rows, dim), 1.0)
    yield _linear(f"{prefix}.wkv", (streams + 1) * hidden, columns * dim)
    yield TensorSpec(f"{prefix}.q_weight", (streams, hidden), 0.25, mean=1.0)
    yield TensorSpec(f"{prefix}.k_weight", (streams, hidden), 0.25, mean=1.0)
