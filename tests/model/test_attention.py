"""A layer's attention, window and compressed rows together, against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41 import gather_attention, indexer
from deepinfer_vllm.models.deepseek_v41.attention import Attention, GroupedLinear
from deepinfer_vllm.models.deepseek_v41.cache import PagedCache
from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from deepinfer_vllm.models.deepseek_v41.step import Step
from deepinfer_vllm.models.deepseek_v41.topology import layer_role
from deepinfer_vllm.models.deepseek_v41.windows import Windows
from reference import Config
from reference import attention as reference
from small_model import bind, both_configs, fill, make_step, normal, scattered

BLOCK, BLOCKS, LENGTH = 8, 6, 45
BATCHES = {
    "whole": [[(0, 45), (0, 45), (0, 45)]],
    "cut": [[(0, 1), (0, 45), (0, 2)], [(1, 14), (45, 45), (2, 33)], [(14, 45), (45, 45), (33, 45)]],
    "singly": [[(t, t + 1)] * 3 for t in range(LENGTH)],
}

pytestmark = pytest.mark.usefixtures("vllm_layers")


@dataclass
class Case:
    module: Attention
    weights: dict[str, torch.Tensor]
    config: Config
    layer: int
    caches: list[PagedCache]
    x: torch.Tensor  # [3 requests, LENGTH, hidden]

    def steps(self, batches: list[list[tuple[int, int]]]) -> list[Step]:
        """One table for all caches; every row not written is NaN."""
        table = scattered(3, BLOCKS)
        for cache in self.caches:
            bind(cache, 3 * BLOCKS + 1, torch.nan)
        return [make_step(batch, {cache.name: table for cache in self.caches}) for batch in batches]

    def run(self, batches: list[list[tuple[int, int]]]) -> torch.Tensor:
        """[3, LENGTH, hidden]"""
        out = torch.full_like(self.x, torch.nan)
        for step in self.steps(batches):
            x = self.x[step.request, step.positions]
            self.module.write(x, step)
            out[step.request, step.positions] = self.module.attend(x, step)
        return out

    def expected(self, request: int, first: int = 0) -> torch.Tensor:
        """Of a request's tokens from `first` on, as if none had come before: rotation is relative, so they may move."""
        x = self.x[request, first:].double()
        return reference.attention(x, self.layer, self.weights, self.config, reference.Shared(), False)


def make(layer: int, *, rebuilt: bool = False) -> Case:
    """Layer 0 has a window only, 1 compressed rows of pairs, 2 of single tokens."""
    ours, theirs = both_configs(index_topk=5, candidate_source_layer_id=-1)
    registry: dict[str, PagedCache] = {}
    role = layer_role(ours, layer)
    module = Attention(
        ours,
        role,
        Numerics(quantised=False),
        BLOCK,
        torch.float32,
        registry,
        {},
        f"layers.{layer}.attn",
        windows=Windows.plan(ours, 0),
        rebuilt=rebuilt,
    )
    weights = fill(module, seed=layer, prefix=f"layers.{layer}.attn.")
    return Case(module, weights, theirs, layer, list(registry.values()), normal(9, 3, LENGTH, 32))


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_as_the_reference(layer: int, batches: str) -> None:
    case = make(layer)
    for request, got in enumerate(case.run(BATCHES[batches])):
        torch.testing.assert_close(got.double(), case.expected(request), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_size_of_chunks_does_not_matter(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(layer)
    whole = case.run(BATCHES["whole"])
    for workspace in (1, 5000):
        monkeypatch.setattr(gather_attention, "WORKSPACE_BYTES", workspace)
        monkeypatch.setattr(indexer, "WORKSPACE_BYTES", workspace)
        torch.testing.assert_close(case.run(BATCHES["whole"]), whole, rtol=1e-6, atol=1e-6)


def attend_from(case: Case, floors: list[int]) -> list[torch.Tensor]:
    """By request, the last three tokens when only rows from the floors on were written."""
    (step,) = case.steps([[(LENGTH - 3, LENGTH)] * 3])
    written = make_step([(floor, LENGTH) for floor in floors], step.tables)
    case.module.write(case.x[written.request, written.positions], written)
    step.window_floor = torch.tensor(floors)
    return list(case.module.attend(case.x[step.request, step.positions], step).split(3))


def test_a_floor_hides_the_rows_below_it() -> None:
    case, floors = make(0, rebuilt=True), [LENGTH - 3, LENGTH - 5, 0]
    for request, got in enumerate(attend_from(case, floors)):
        expected = case.expected(request, floors[request])[-3:]
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(case.expected(0, floors[0])[-3:], case.expected(0)[-3:], atol=1e-2)


def test_layers_that_skip_no_rows_have_no_floor() -> None:
    assert not any(bool(got.isfinite().all()) for got in attend_from(make(0), [LENGTH - 3] * 3))


def test_grouped_projection() -> None:
    linear = GroupedLinear(3, 4, 5, torch.float32)
    fill(linear, seed=1)
    x = normal(2, 7, 12)
    got = linear(x)
    for t in range(7):
        for group in range(3):
            weight = linear.weight[5 * group : 5 * group + 5].double()
            expected = weight @ x[t, 4 * group : 4 * group + 4].double()
            torch.testing.assert_close(got[t, 5 * group : 5 * group + 5].double(), expected, rtol=1e-5, atol=1e-6)
