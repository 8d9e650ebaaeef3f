"""Memory that was never written does not reach a result, whatever it holds."""

from pathlib import Path

import pytest
import torch

from deepinfer_vllm.checkpoint.bare import BareModel, Trace
from deepinfer_vllm.models.deepseek_v41.cache import PagedCache
from topologies import bare_model, covered, write_random

SEEDS = [56, 23]


def poison(model: BareModel, integer: int) -> None:
    """Every cache filled with NaN; the one of token ids with a number."""
    caches = [module for module in model.model.modules() if isinstance(module, PagedCache)]
    assert caches
    for cache in caches:
        cache.kv_cache.fill_(torch.nan if cache.kv_cache.is_floating_point() else integer)


def assert_equal(one: Trace, other: Trace) -> None:
    assert bool(one.logits.isfinite().all())
    for name in ("logits", "hidden_states", "router_ids", "router_weights"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for layer, rows in one.index_topk.items():
        assert torch.equal(rows, other.index_topk[layer])
    for layer, rows in one.engram_rows.items():
        assert torch.equal(rows, other.engram_rows[layer])


def test_the_seeds_have_every_cache() -> None:
    assert {"both ratios", "candidates that bite", "Engram in layer 0"} <= covered(56)
    assert {"both ratios", "compressed first layer", "Engram in the last layer"} <= covered(23)


@pytest.mark.parametrize("integer", [-1, 7, 2**31 - 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_prefill_reads_only_what_it_wrote(seed: int, integer: int, tmp_path: Path) -> None:
    ids = write_random(tmp_path, seed)
    with bare_model(tmp_path) as model:
        for chunk in (None, 17, 5):
            clean = model.prefill(ids, chunk)
            poison(model, integer)
            assert_equal(model.prefill(ids, chunk), clean)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_shorter_prompt_after_a_longer_one(seed: int, tmp_path: Path) -> None:
    """Rows that another request left behind are not there for the next."""
    ids = write_random(tmp_path, seed)
    with bare_model(tmp_path) as model:
        fresh = model.prefill(ids[:31], 9)
        model.prefill(ids.flip(0), 17)
        assert_equal(model.prefill(ids[:31], 9), fresh)
