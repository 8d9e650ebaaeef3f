"""Random checkpoints for tests, what they cover, and the bare model over them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deepinfer_vllm.checkpoint.bare import BareModel, Trace
from deepinfer_vllm.checkpoint.compare import padded_sets
from deepinfer_vllm.checkpoint.topology import random_config
from deepinfer_vllm.checkpoint.writer import write_checkpoint
from reference import Output

TOKENS = 90


@contextlib.contextmanager
def bare_model(directory: Path, **options: Any) -> Iterator[BareModel]:
    """The checkpoint's modules, with this plugin in force; vLLM's process group is left at the end."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    try:
        yield BareModel(directory, **options)
    finally:
        cleanup_dist_env_and_memory()  # what BareModel.close does; also when there is no model to close


def write_random(directory: Path, seed: int) -> torch.Tensor:
    """A checkpoint of random topology; ids of a prompt for it."""
    config = random_config(seed)
    write_checkpoint(directory, config, seed=seed)
    vocabulary = config["text_config"]["vocab_size"]
    return torch.randint(vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(seed))


def assert_same(trace: Trace, expected: Output) -> None:
    """The trace is the reference's: values within float32, choices exactly."""
    assert float((trace.logits - expected.logits).abs().max()) <= 2e-4
    best = expected.logits.topk(2, dim=-1).values
    sure = best[:, 0] - best[:, 1] >= 1e-3
    assert torch.equal(trace.logits.argmax(-1)[sure], expected.logits.argmax(-1)[sure])
    hidden = (trace.hidden_states - expected.hidden_states).norm(dim=(1, 2)) / expected.hidden_states.norm(dim=(1, 2))
    assert float(hidden.max()) <= 1e-5
    assert {layer: padded_sets(rows) for layer, rows in trace.index_topk.items()} == expected.index_topk
    assert torch.equal(trace.router_ids, expected.router_ids)
    if expected.engram_hash_ids is not None:
        assert torch.equal(torch.stack(list(trace.engram_rows.values())), expected.engram_hash_ids)
    if expected.candidate_blocks is not None:
        assert trace.candidate_blocks is not None
        for ours, theirs in zip(padded_sets(trace.candidate_blocks), expected.candidate_blocks, strict=True):
            assert ours == theirs or (not ours and theirs == set(range(len(theirs))))


def covered(seed: int) -> set[str]:
    """What the topology of a seed exercises."""
    text = random_config(seed)["text_config"]
    cases = {
        "no compressed layer": not any(text["compress_ratios"]),
        "candidates that bite": _candidates_bite(text),
        "a newer KV source under the mask": _candidates_bite(text)
        and text["candidate_source_layer_id"] < max(text["kv_source_layer_ids"]),
        "both ratios": {1, 2} <= set(text["compress_ratios"]),
        "three KV sources": len(text["kv_source_layer_ids"]) >= 3,
        "compressed first layer": text["compress_ratios"][0] > 0,
        "Engram in layer 0": 0 in text["engram_layer_ids"],
        "Engram in the last layer": text["num_hidden_layers"] - 1 in text["engram_layer_ids"],
        "only 2-grams": bool(text["engram_layer_ids"]) and text["engram_max_ngram_size"] == 2,
        "no Engram": not text["engram_layer_ids"],
        "odd window": text["sliding_window"] % 2 == 1,
        "two streams": text["hc_mult"] == 2,
        "one expert a token": text["num_experts_per_tok"] == 1,
    }
    return {name for name, holds in cases.items() if holds}


def _candidates_bite(text: dict[str, Any]) -> bool:
    """Whether a later index source must choose among fewer rows than there are."""
    source = text["candidate_source_layer_id"]
    if not 0 <= source < max(text["index_source_layer_ids"], default=-1):
        return False
    kept = text["candidate_topk_blocks"] * text["candidate_block_size"]
    return kept < TOKENS // text["compress_ratios"][source] - text["candidate_block_size"]
