"""Layer by layer: a request's rows alone, in chunks and in batches are the same bits where the mode asks for it.

What fails here names the first layer whose rows moved: the place to look for the operation that did it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ranks
from deepinfer_vllm.checkpoint.backends import BareBackend
from deepinfer_vllm.checkpoint.bare import BareModel
from deepinfer_vllm.models.deepseek_v41 import verify_config
from deepinfer_vllm.models.deepseek_v41.parallel import sum_over_tp
from deepinfer_vllm.models.deepseek_v41.verify_config import _invariance_problems
from deepinfer_vllm.native import invariance, invariant
from small_model import generator, make_step, normal

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
LENGTHS = (100, 37, 61)
BLOCKS = 4
"""Of each request."""

Steps = list[list[tuple[int, int]]]
"""By step and request: the positions that are computed; an empty range for none."""

ALONE: Steps = [[(0, 100)], [(0, 0), (0, 37)], [(0, 0), (0, 0), (0, 61)]]
CUT: dict[str, Steps] = {
    "together": [[(0, length) for length in LENGTHS]],
    "by 1": [[(p, min(p + 1, length)) if p < length else (0, 0) for length in LENGTHS] for p in range(max(LENGTHS))],
    "by 17": [
        [(low, min(low + 17, length)) if low < length else (0, 0) for length in LENGTHS]
        for low in range(0, max(LENGTHS), 17)
    ],
    "unevenly": [
        [(0, 50), (0, 37)],
        [(50, 51), (0, 0), (0, 20)],
        [(51, 99), (0, 0), (20, 61)],
        [(99, 100)],
    ],
}


def computed(model: BareModel, steps: Steps) -> list[list[torch.Tensor]]:
    """By request: the streams [T, M * hidden] after every layer, and the logits [T, V] last."""
    drawn = generator(1)
    texts = [torch.randint(3, 380, (length,), generator=drawn) for length in LENGTHS]
    for cache in model._caches:
        cache.kv_cache.fill_(float("nan") if cache.kv_cache.is_floating_point() else 2**31 - 1)
    found: list[list[list[torch.Tensor]]] = [[] for _ in texts]
    for ranges in steps:
        here = [request for request, (start, end) in enumerate(ranges) if end > start]
        table = torch.cat([model._table[:, BLOCKS * request : BLOCKS * (request + 1)] for request in here])
        tables = {cache.name: table for cache in model._caches}
        ids = torch.cat([texts[request][slice(*ranges[request])] for request in here])
        step = make_step([ranges[request] for request in here], tables)
        for request, (start, end) in zip(here, step.spans, strict=True):
            found[request].append([rows[start:end] for rows in (_layers(model.model, step, ids))])
    return [[torch.cat(parts) for parts in zip(*chunks, strict=True)] for chunks in found]


@torch.inference_mode()
def _layers(model: Any, step: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    embeds = model.embed(ids)
    trace: list[tuple[torch.Tensor, torch.Tensor]] = []
    if invariance.by_tokens():
        hidden = model._one_by_one(step, ids, embeds, [])
    else:
        hidden = model.run(step, ids, embeds, trace=trace)
    return [*(streams.flatten(1) for streams, _ in trace), model.compute_logits(hidden)]


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    yield
    invariance._way = invariance.Way.NONE


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize(
    ("name", "dtype", "numerics"),
    [
        ("v41-tiny-a", "float32", "plain"),
        ("v41-tiny-b", "bfloat16", "plain"),
        ("v41-tiny-a-fp8", "bfloat16", "qat"),
        ("v41-tiny-a-fp8", "float32", "plain"),
        ("v41-tiny-a", "float16", "plain"),
    ],
)
def test_every_layer(name: str, dtype: str, numerics: str) -> None:
    backend = BareBackend(GOLDEN / name, dtype, numerics)
    try:
        assert invariance.by_rows()
        wanted = computed(backend._model, ALONE)
        for how, steps in CUT.items():
            for request, (found, want) in enumerate(zip(computed(backend._model, steps), wanted, strict=True)):
                differing = [n for n, (a, b) in enumerate(zip(found, want, strict=True)) if not torch.equal(a, b)]
                assert not differing, f"{how}, request {request}: first differs after layer {differing[0]}"
    finally:
        backend.close()


@pytest.mark.usefixtures("switched_on")
def test_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "library", lambda: None)
    backend = BareBackend(GOLDEN / "v41-tiny-b", "float32", "plain")
    try:
        assert invariance.by_tokens()
        wanted = computed(backend._model, ALONE)
        for steps in (CUT["together"], CUT["unevenly"]):
            for found, want in zip(computed(backend._model, steps), wanted, strict=True):
                assert torch.equal(found[-1], want[-1])
    finally:
        backend.close()


def test_ranks_add_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of an all-reduce is."""
    monkeypatch.setattr(invariance, "_way", invariance.Way.ROWS)
    parts = [normal(rank, 5, 33) * 10.0**rank for rank in range(3)]
    for found in ranks.start(monkeypatch, tp=3).run(lambda rank: sum_over_tp(parts[rank])):
        assert torch.equal(found, parts[0] + parts[1] + parts[2])


@pytest.mark.usefixtures("switched_on")
def test_what_would_move_sums_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(*, eplb: bool = False, dp: int = 1, fp64: bool = False) -> list[str]:
        parallel = SimpleNamespace(enable_eplb=eplb, data_parallel_size=dp)
        model = SimpleNamespace(use_fp64_gumbel=fp64)
        return _invariance_problems(
            SimpleNamespace(parallel_config=parallel, model_config=model, speculative_config=object())
        )

    assert problems(dp=2) == []
    assert problems(eplb=True) == ["--enable-eplb=True (must be off under VLLM_BATCH_INVARIANT=1)"]
    assert problems(fp64=True) == ["--use-fp64-gumbel=True (must be off with drafts under VLLM_BATCH_INVARIANT=1)"]
    monkeypatch.setattr(invariant, "library", lambda: None)
    assert problems(dp=2) == [
        "--data-parallel-size=2 (must be 1 without compiled kernels under VLLM_BATCH_INVARIANT=1)"
    ]
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    assert problems(eplb=True, dp=2, fp64=True) == []


@pytest.mark.usefixtures("switched_on")
def test_what_does_not_hold_on_a_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    said: list[str] = []
    monkeypatch.setattr(verify_config.logger, "warning", lambda text, *of: said.append(text % of))
    parallel = SimpleNamespace(enable_eplb=False, data_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=object(), model_config=SimpleNamespace())
    config.model_config.use_fp64_gumbel = False
    assert _invariance_problems(config) == said == []
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    assert _invariance_problems(config) == []
    slow, drafts = said
    assert "one token at a time" in slow and "with drafts on cuda" in drafts and "at temperature 0 only" in drafts
