"""The model against the float64 reference on checkpoints of random topology, whole and in chunks."""

from pathlib import Path

import pytest
import torch

from deepinfer_vllm.checkpoint.bare import Trace
from deepinfer_vllm.checkpoint.compare import padded_sets
from reference import Output, load
from topologies import bare_model, covered, write_random

SEEDS = [5, 6, 7, 10, 14, 16, 23, 25, 31, 32, 38, 56]
EVERYTHING = {
    "no compressed layer",
    "candidates that bite",
    "a newer KV source under the mask",
    "both ratios",
    "three KV sources",
    "compressed first layer",
    "Engram in layer 0",
    "Engram in the last layer",
    "only 2-grams",
    "no Engram",
    "odd window",
    "two streams",
    "one expert a token",
}


def test_the_seeds_cover_every_kind_of_topology() -> None:
    assert set().union(*(covered(seed) for seed in SEEDS)) == EVERYTHING


def assert_same(trace: Trace, expected: Output) -> None:
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


@pytest.mark.parametrize("seed", SEEDS)
def test_as_the_reference(seed: int, tmp_path: Path) -> None:
    ids = write_random(tmp_path, seed)
    expected = load(tmp_path).forward(ids)
    with bare_model(tmp_path) as model:
        for chunk in (None, 17, 5):
            assert_same(model.prefill(ids, chunk), expected)
