"""Rows in paged memory: found through the block table, wherever their block lies and however memory is laid out."""

from typing import Any

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.cache import PagedCache, compressed_spec, window_spec
from small_model import bind, make_step, normal, scattered

BLOCK, WIDTH, BLOCKS = 4, 6, 5


def make_cache(ratio: int = 1, name: str = "rows") -> PagedCache:
    return PagedCache(name, compressed_spec(BLOCK, WIDTH, torch.float32, ratio), {})


@pytest.mark.parametrize("ratio", [1, 2])
def test_rows_of_several_requests_in_scattered_blocks(ratio: int) -> None:
    cache, table = make_cache(ratio), scattered(3, BLOCKS)
    bind(cache, 3 * BLOCKS + 1)
    rows = BLOCKS * BLOCK // ratio
    assert cache.rows_per_block == BLOCK // ratio
    stored = {(r, i): normal(100 * r + i, WIDTH) for r in range(3) for i in range(rows)}
    order = list(stored)[::2] + list(stored)[1::2]
    request, row = torch.tensor(order).unbind(-1)
    cache.write(table, request, row, torch.stack([stored[key] for key in order]))
    for (r, i), values in stored.items():
        block, offset = int(table[r, i // cache.rows_per_block]), i % cache.rows_per_block
        assert torch.equal(cache.kv_cache[block, offset], values)
    assert not bool(cache.kv_cache[0].any())
    got = cache.read(table, torch.tensor([[2], [0]]), torch.tensor([[3, 0, 7], [rows - 1, 1, 1]]))
    assert got.shape == (2, 3, WIDTH)
    for t, r in enumerate((2, 0)):
        for k, i in enumerate(((3, 0, 7), (rows - 1, 1, 1))[t]):
            assert torch.equal(got[t, k], stored[r, i])
    assert torch.equal(cache.read(table, torch.tensor([1]), torch.tensor([2]), 4)[0], stored[1, 2][:4])


def test_no_rows_at_all() -> None:
    cache = make_cache()
    bind(cache, 2)
    table = torch.ones(1, 1, dtype=torch.int32)
    nobody = torch.zeros(0, dtype=torch.long)
    cache.write(table, nobody, nobody, torch.zeros(0, WIDTH))
    request = torch.zeros(3, 1, dtype=torch.long)
    assert cache.read(table, request, torch.zeros(3, 0, dtype=torch.long)).shape == (3, 0, WIDTH)


def test_blocks_of_several_caches_side_by_side() -> None:
    """vLLM hands each layer a view into one memory whose blocks hold a page of every layer."""
    ours, others, page = make_cache(), make_cache(name="others"), BLOCK * WIDTH
    memory = torch.full((2 * BLOCKS + 1, 2 * page + 3), torch.nan)

    def view(start: int) -> torch.Tensor:
        return memory[:, start : start + page].unflatten(1, (1, BLOCK, WIDTH))

    ours.bind_kv_cache(view(3))
    others.bind_kv_cache(view(3 + page))
    assert not ours.kv_cache.is_contiguous() and ours.kv_cache.data_ptr() == memory[:, 3:].data_ptr()
    table = scattered(2, BLOCKS, seed=1)
    request, row = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 5, 0, 6, 19])
    values = normal(1, 5, WIDTH)
    ours.write(table, request, row, values)
    assert bool(others.kv_cache.isnan().all()) and int((~memory.isnan()).sum()) == values.numel()
    others.write(table, request, row, -values)
    assert torch.equal(ours.read(table, request, row), values)
    assert torch.equal(others.read(table, request, row), -values)


def test_values_take_the_dtype_of_the_cache() -> None:
    registry: dict[str, Any] = {}
    cache = PagedCache("ids", window_spec(BLOCK, 1, torch.int32, 7), registry)
    bind(cache, 2)
    table = torch.ones(1, 1, dtype=torch.int32)
    big = torch.tensor([[129_279], [-1]])
    cache.write(table, torch.zeros(2, dtype=torch.long), torch.arange(2), big)
    assert cache.kv_cache.dtype == torch.int32
    assert cache.read(table, torch.zeros(2, dtype=torch.long), torch.arange(2)).tolist() == big.tolist()


def test_a_name_is_registered_once() -> None:
    registry: dict[str, Any] = {}
    spec = window_spec(BLOCK, WIDTH, torch.float32, 7)
    cache = PagedCache("window", spec, registry)
    assert registry == {"window": cache} and cache.get_kv_cache_spec(None) is spec
    with pytest.raises(ValueError, match="window"):
        PagedCache("window", spec, registry)


def test_specs_say_what_vllm_must_keep() -> None:
    window = window_spec(32, WIDTH, torch.bfloat16, 128, rebuilt=True)
    assert window.sliding_window == 128 and window.bounded_replay and window.num_states == 32
    rows = compressed_spec(32, WIDTH, torch.bfloat16, 2)
    assert rows.num_states == 16 and not hasattr(rows, "sliding_window") or rows.sliding_window is None
    assert rows.page_size_bytes == 16 * WIDTH * 2


def test_a_step_reads_and_writes_its_own_requests() -> None:
    cache, table = make_cache(), scattered(2, BLOCKS)
    bind(cache, 2 * BLOCKS + 1)
    step = make_step([(0, 3), (6, 8)], {"rows": table})
    values = normal(2, 5, WIDTH)
    step.write(cache, values)
    got = step.read(cache, step.positions.unsqueeze(-1) - torch.tensor([0]), 3)
    assert torch.equal(got.squeeze(1), values[:, :3])
    before = step.read(cache, torch.tensor([[0], [0], [0], [6], [6]]))
    assert torch.equal(before.squeeze(1), values[[0, 0, 0, 3, 3]])
