"""Nothing here takes the CPU for granted: each piece on a device without values, where mixing devices is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer_vllm.models.deepseek_v41.attention import GroupedLinear
from deepinfer_vllm.models.deepseek_v41.cache import PagedCache, compressed_spec
from deepinfer_vllm.models.deepseek_v41.compressor import Compressor
from deepinfer_vllm.models.deepseek_v41.engram import Engram
from deepinfer_vllm.models.deepseek_v41.engram_hash import hash_layouts, ngram_rows
from deepinfer_vllm.models.deepseek_v41.engram_table import EngramTable
from deepinfer_vllm.models.deepseek_v41.gather_attention import gather_attention
from deepinfer_vllm.models.deepseek_v41.indexer import head_sum
from deepinfer_vllm.models.deepseek_v41.mhc import HyperConnection, collapse, expand
from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from deepinfer_vllm.models.deepseek_v41.rope import RotaryTable, inverse_frequencies, rotate
from deepinfer_vllm.models.deepseek_v41.router import Router
from deepinfer_vllm.models.deepseek_v41.span_attention import Compressed, span_attention
from deepinfer_vllm.models.deepseek_v41.topk import ascending, stable_topk
from deepinfer_vllm.models.deepseek_v41.windows import Windows
from small_model import both_configs

DEVICE = torch.device("meta")
T = 6

pytestmark = pytest.mark.usefixtures("vllm_layers")


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """As vLLM builds a model: new tensors are on the device unless told otherwise."""
    with FakeTensorMode(allow_non_fake_inputs=True), DEVICE:
        yield


def on_device(*tensors: Any) -> bool:
    return all(tensor.device == DEVICE for tensor in tensors)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


@pytest.fixture
def config() -> Any:
    return both_configs()[0]


def test_rotation(config: Any) -> None:
    table = RotaryTable(torch.arange(T), inverse_frequencies(config.compress_rope))
    assert on_device(table.cos, rotate(torch.ones(T, 3, 16), table), rotate(torch.ones(T, 16), table, inverse=True))


def test_hyper_connections() -> None:
    streams = torch.ones(T, 4, 32)
    pre, post, comb = HyperConnection(4, 32, 20, 1e-6, 1e-6)(streams)
    assert on_device(pre, post, comb, collapse(streams, pre), expand(torch.ones(T, 32), streams, post, comb))


@pytest.mark.parametrize("kind", ["window", "compressed", "index"])
def test_rounding(kind: str) -> None:
    assert on_device(getattr(Numerics(quantised=True), kind)(torch.ones(T, 64)))


def test_selection() -> None:
    best = stable_topk(torch.ones(T, 9), 4)
    assert on_device(best, ascending(best, best > 2))


def test_attention() -> None:
    valid = torch.ones(T, 5, dtype=torch.bool)
    out = gather_attention(torch.ones(T, 3, 8), torch.ones(T, 5, 8), valid, torch.ones(3), 0.5)
    assert on_device(out, GroupedLinear(3, 8, 4, torch.float32)(out.flatten(1)))


@pytest.mark.parametrize("selected", [2, 50])
def test_attention_of_a_span(selected: int) -> None:
    """Rows gathered, and all multiplied."""
    rows = Compressed(ids(40, selected), 1, lambda row: torch.ones(*row.shape, 8))
    out = span_attention(torch.ones(40, 3, 8), 300, torch.ones(46, 8), 7, rows, torch.ones(3), 0.5)
    assert on_device(out, head_sum(torch.ones(T, 3, 8), torch.ones(T, 3), torch.ones(9, 8)))


def test_routing(config: Any) -> None:
    assert on_device(*Router(config).route(torch.ones(T, 32)))


def test_paged_rows() -> None:
    cache = PagedCache("rows", compressed_spec(4, 8, torch.float32, 1), {})
    cache.bind_kv_cache(torch.ones(3, 1, 4, 8))
    cache.write(ids(1, 2), ids(T), torch.arange(T), torch.ones(T, 8))
    assert on_device(cache.read(ids(1, 2), ids(T, 1), ids(T, 5)))


def test_compression(config: Any) -> None:
    module = Compressor(config, 2, Numerics(quantised=False), 4, torch.float32, {}, "c", Windows.plan(config, 0))
    assert on_device(*module.parameters(), module.wgate(torch.ones(T, 32)))


def test_ngrams(config: Any) -> None:
    for layout in hash_layouts(config.engram):
        assert on_device(layout.multipliers, layout.primes, layout.offsets)
        assert on_device(ngram_rows(ids(T, 4), torch.arange(T), 3, layout))


def test_memory_comes_from_the_host(config: Any) -> None:
    module = Engram(config, config.engram, torch.float32, "engram")
    del module.wkv  # vLLM's, which wants to be prepared for its platform
    module.wkv = lambda x: torch.ones(len(x), 5 * 32)
    module.table = EngramTable(torch.ones(50, config.engram.head_dim, device="cpu"))
    assert on_device(module(torch.ones(T, 4, 32), ids(T, config.engram.num_columns)))
