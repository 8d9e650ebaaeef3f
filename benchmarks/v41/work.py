"""What a step of V4.1 must read and multiply at the least, counted from its configuration and not from our code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepinfer_vllm.checkpoint.tensors import TensorSpec, tensor_specs

Shape = tuple[int, int, int]
"""(m, n, k): [m, k] times [k, n]."""


@dataclass(frozen=True)
class ActiveWeights:
    """Bytes of the weights that a decode step multiplies by."""

    dense: int
    """All but the routed experts; of embeddings and Engram tables a token reads a few rows, which are left out."""
    expert: int
    """One routed expert of one layer."""

    def of(self, experts: int) -> int:
        """With so many (layer, expert) pairs hit."""
        return self.dense + experts * self.expert


def active_weights(config: dict[str, Any], weight_bytes: int) -> ActiveWeights:
    """`weight_bytes`: of one element of a weight that the checkpoint does not keep in float32."""
    dense = expert = 0
    for spec in _text_specs(config):
        size = math.prod(spec.shape) * (4 if spec.is_float32 else weight_bytes)
        if ".experts.0." in spec.name and spec.name.startswith("layers.0."):
            expert += size
        elif ".experts." not in spec.name and not _read_by_row(spec):
            dense += size
    return ActiveWeights(dense, expert)


def _text_specs(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """Without tower, aligner and draft layers, which these steps do not use."""
    return (s for s in tensor_specs(config) if s.name.startswith(("embed.", "layers.", "norm.", "head.")))


def _read_by_row(spec: TensorSpec) -> bool:
    return spec.name == "embed.weight" or ".engram.embed." in spec.name


def linear_shapes(config: dict[str, Any], tokens: int) -> Counter[Shape]:
    """The products with weights of a prefill step of `tokens`, tokens spread evenly over the experts. The head, which
    sees one token of a prompt, is left out."""
    text = config["text_config"]
    per_expert = max(1, tokens * text["num_experts_per_tok"] // text["n_routed_experts"])
    shapes: Counter[Shape] = Counter()
    for spec in _text_specs(config):
        if len(spec.shape) != 2 or _read_by_row(spec) or spec.name == "head.weight" or spec.name.endswith("_weight"):
            continue
        outputs, inputs = spec.shape
        if spec.name.endswith(".wo_a.weight"):
            shapes[tokens, outputs // text["o_groups"], inputs] += text["o_groups"]
        else:
            shapes[per_expert if ".experts." in spec.name else tokens, outputs, inputs] += 1
    return shapes


@dataclass(frozen=True)
class AttentionWork:
    """Floating-point operations of a whole prompt's attention."""

    window: int
    selected: int
    indexer: int


def attention_work(config: dict[str, Any], tokens: int) -> AttentionWork:
    """Rows that the definition says are seen, no more: in every layer the window, in compressed ones the selected
    rows, and in index sources the scores of all visible rows where more than `index_topk` are."""
    text = config["text_config"]
    row = 4 * text["num_attention_heads"] * text["head_dim"]
    key = 2 * text["index_n_heads"] * text["index_head_dim"]
    window = sum(min(t + 1, text["sliding_window"]) for t in range(tokens)) * text["num_hidden_layers"]
    selected = indexed = 0
    for layer, ratio in enumerate(text["compress_ratios"][: text["num_hidden_layers"]]):
        if ratio:
            visible = [(t + 1) // ratio for t in range(tokens)]
            selected += sum(min(v, text["index_topk"]) for v in visible)
            if layer in text["index_source_layer_ids"]:
                indexed += sum(v for v in visible if v > text["index_topk"])
    return AttentionWork(window * row, selected * row, indexed * key)
