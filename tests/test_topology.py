"""Random configs: legal, varied, and computable by the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_vllm.checkpoint.topology import random_config
from deepinfer_vllm.checkpoint.writer import write_checkpoint
from legal_config import assert_legal
from reference import load

CONFIGS = [random_config(seed) for seed in range(200)]


def test_all_are_legal() -> None:
    for config in CONFIGS:
        assert_legal(config)


def test_the_same_seed_gives_the_same_config() -> None:
    assert [random_config(seed) for seed in range(20)] == CONFIGS[:20]


def test_they_cover_what_a_topology_can_be() -> None:
    texts = [config["text_config"] for config in CONFIGS]

    def last_kv(t: dict[str, Any]) -> int:
        return max(t["kv_source_layer_ids"], default=-1)

    def last_index(t: dict[str, Any]) -> int:
        return max(t["index_source_layer_ids"], default=-1)

    cases = {
        "no compressed layer": lambda t: not any(t["compress_ratios"]),
        "compressed first layer": lambda t: t["compress_ratios"][0] > 0,
        "both ratios": lambda t: {1, 2} <= set(t["compress_ratios"]),
        "three KV sources": lambda t: len(t["kv_source_layer_ids"]) >= 3,
        "an index source that is no KV source": lambda t: t["index_source_layer_ids"] != t["kv_source_layer_ids"],
        "a plain layer above a compressed one": lambda t: last_kv(t) >= 0 and 0 in t["compress_ratios"][last_kv(t) :],
        "no candidates": lambda t: t["candidate_source_layer_id"] < 0 and t["index_source_layer_ids"],
        "a masked layer": lambda t: 0 <= t["candidate_source_layer_id"] < last_index(t),
        "a newer KV source under the mask": lambda t: 0 <= t["candidate_source_layer_id"] < last_kv(t),
        "candidates that never bite": lambda t: t["candidate_topk_blocks"] == 1000,
        "Engram in layer 0": lambda t: 0 in t["engram_layer_ids"],
        "Engram in the last layer": lambda t: t["num_hidden_layers"] - 1 in t["engram_layer_ids"],
        "no Engram": lambda t: not t["engram_layer_ids"],
        "three Engram layers": lambda t: len(t["engram_layer_ids"]) == 3,
        "only 2-grams": lambda t: t["engram_max_ngram_size"] == 2,
        "two streams": lambda t: t["hc_mult"] == 2,
        "odd vocabulary": lambda t: t["vocab_size"] % 2,
        "weights not normalised": lambda t: not t["norm_topk_prob"],
        "gate temperature": lambda t: t.get("gate_temp", 1.0) != 1.0,
        "a window that is no power of two": lambda t: t["sliding_window"] == 13,
    }
    for name, holds in cases.items():
        assert sum(bool(holds(text)) for text in texts) >= 4, name


@pytest.mark.parametrize("seed", range(12))
def test_the_reference_computes_them(seed: int, tmp_path: Path) -> None:
    config = CONFIGS[seed]
    write_checkpoint(tmp_path, config, seed=seed)
    vocabulary = config["text_config"]["vocab_size"]
    ids = torch.randint(vocabulary, (70,), generator=torch.Generator().manual_seed(seed))
    for qat in (False, True):
        out = load(tmp_path).forward(ids, qat=qat)
        assert out.logits.shape == (70, vocabulary) and bool(out.logits.isfinite().all())
        assert 2 < float(out.logits.std()) < 7
        assert out.logits.argmax(-1).unique().numel() >= 10
        assert set(out.index_topk) == set(config["text_config"]["index_source_layer_ids"])


def test_a_prefix_has_the_same_values_alone(tmp_path: Path) -> None:
    """Causality: what comes later must not move a row."""
    write_checkpoint(tmp_path, CONFIGS[3], seed=1)
    reference = load(tmp_path)
    ids = torch.arange(60) % 300 + 3
    torch.testing.assert_close(reference.forward(ids[:33]).logits, reference.forward(ids).logits[:33])
