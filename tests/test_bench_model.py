"""What `make bench-model` counts as work, and what it calls met."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.checkpoint.presets import preset
from deepinfer_vllm.checkpoint.tensors import tensor_specs

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from v41.report import Limit, table  # noqa: E402
from v41.work import active_weights, attention_work, linear_shapes  # noqa: E402


def _is_text(name: str) -> bool:
    return name.split(".")[0] in ("embed", "layers", "norm", "head")


@pytest.mark.parametrize("name", ["tiny", "mid"])
def test_every_weight_is_dense_routed_or_read_by_row(name: str) -> None:
    config = preset(name).published()
    text, weights = config["text_config"], active_weights(config, 2)
    assert weights.expert == 3 * 2 * text["hidden_size"] * text["moe_intermediate_size"]
    routed = weights.expert * text["n_routed_experts"] * text["num_hidden_layers"]
    sizes = {s.name: math.prod(s.shape) * (4 if s.is_float32 else 2) for s in tensor_specs(config) if _is_text(s.name)}
    by_row = sum(size for n, size in sizes.items() if n == "embed.weight" or n.endswith("engram.embed.weight"))
    assert weights.dense + routed + by_row == sum(sizes.values())
    assert weights.of(5) == weights.dense + 5 * weights.expert


def test_products_with_weights() -> None:
    """Each matrix once a token, a routed one once a token that takes it, the head not at all."""
    config, tokens = preset("mid").published(), 400
    text, flops = config["text_config"], 0.0
    for spec in tensor_specs(config):
        if len(spec.shape) == 2 and not spec.name.endswith(("embed.weight", "head.weight", "q_weight", "k_weight")):
            share = text["num_experts_per_tok"] / text["n_routed_experts"] if ".experts." in spec.name else 1
            flops += 2 * tokens * share * math.prod(spec.shape)
    assert sum(2 * m * n * k * count for (m, n, k), count in linear_shapes(config, tokens).items()) == flops


def test_rows_of_attention() -> None:
    """The tiny preset, whose selection of 64 bites, token by token and layer by layer."""
    config, tokens = preset("tiny").published(), 300
    text, work = config["text_config"], attention_work(config, tokens)
    window = selected = indexed = 0
    for layer in range(8):
        for seen in range(1, tokens + 1):
            window += min(seen, 128)
            ratio = text["compress_ratios"][layer]
            rows = seen // ratio if ratio else 0
            selected += min(rows, 64)
            indexed += rows if layer in (2, 4, 5, 7) and rows > 64 else 0
    assert (work.window, work.selected) == (window * 4 * 8 * 64, selected * 4 * 8 * 64)
    assert work.indexer == indexed * 2 * 16 * 32


@pytest.mark.parametrize(
    ("value", "aim", "verdict"),
    [(2.0, 2.0, "met, aim too"), (2.1, 2.0, "met, aim missed"), (3.0, None, "met"), (3.01, 2.0, "missed")],
)
def test_verdicts(value: float, aim: float | None, verdict: str) -> None:
    assert Limit("x", value, 3.0, aim).verdict() == verdict


def test_the_page_has_the_floor_beside_each_value() -> None:
    found: dict[str, Any] = {"tokens_per_second": 10.0, "floor_tokens_per_second": 25.0, "times_floor": 2.5}
    prefill = {**found, "tokens": 64, "chunk_tokens": 32, "replay_tokens_per_second": 18.0, "replay_share": 0.6}
    single = {"threads": 2, "decode_1": found, "decode_8": found, "prefill": prefill}
    machine = {"cpu": "a CPU", "torch": "2", "vllm": "1"}
    facts = {"preset": "mid", "command": "make", "commit": "abc", "date": "today", "machine": machine}
    page = table({**facts, "float32": single, "start": {"seconds": 30.0}})
    assert "| float32 | decode, batch 8 | 10.0 | 25.0 | 2.50 |" in page
    assert "| decode at batch 1, times its floor | 2.50× | 3× | 2× | met, aim missed |" in page
    assert "| engine start on the tiny preset | 30.00 s | 25 s |  | missed |" in page
    other = table({**facts, "preset": "tiny", "float32": single, "start": {"seconds": 30.0}})
    assert "| float32 | decode, batch 8 |" in other and "must" not in other
