"""What vLLM's samplers do to a row for the sake of another, and that it is not done in the batch-invariant mode."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_vllm import compat
from deepinfer_vllm.native import invariance

VOCABULARY = 8
IMPOSSIBLE = -float("inf")


@pytest.fixture(autouse=True)
def functions_of_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As they are before and after, whatever engines of other tests have done."""
    from vllm.v1.sample.sampler import Sampler

    compat.provide_torch_kernels()
    for name in ("sample.ops.topk_topp_sampler", "worker.gpu.sample.states", "worker.gpu.sample.sampler"):
        module: Any = importlib.import_module(f"vllm.v1.{name}")
        original = getattr(module.apply_top_k_top_p, "__wrapped__", module.apply_top_k_top_p)
        monkeypatch.setattr(module, "apply_top_k_top_p", original)
    for name in ("forward", "gather_specific_token_logprobs"):
        monkeypatch.setattr(Sampler, name, getattr(getattr(Sampler, name), "__wrapped__", getattr(Sampler, name)))
    yield


def limited(logits: torch.Tensor, k: list[int] | None, p: list[float] | None) -> torch.Tensor:
    from vllm.v1.worker.gpu.sample import states

    top_k = None if k is None else torch.tensor(k, dtype=torch.int32)
    top_p = None if p is None else torch.tensor(p)
    out: torch.Tensor = states.apply_top_k_top_p(logits.clone(), top_k, top_p)
    return out


@pytest.fixture
def rows() -> torch.Tensor:
    """Logits of which some have no probability in float32, and ties."""
    drawn = torch.Generator().manual_seed(1)
    return (torch.randn(4, VOCABULARY, generator=drawn) * 4).round() * 30


def test_top_p_of_one_row_leaves_the_others(rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    k, p = [VOCABULARY, 3, VOCABULARY, 5], [1.0, 1.0, 0.9, 0.7]
    alone = [
        rows[0],
        limited(rows[1:2], k[1:2], None)[0],
        limited(rows[2:3], None, p[2:3])[0],
        limited(rows[3:], k[3:], p[3:])[0],
    ]
    before = limited(rows, k, p)
    assert not torch.equal(before[0], alone[0])  # what this is for
    compat.limit_rows_by_themselves()
    assert torch.equal(limited(rows, k, p), before)  # of the normal mode
    monkeypatch.setattr(invariance, "_way", invariance.Way.ROWS)
    assert torch.equal(limited(rows, k, p), torch.stack(alone))
    assert torch.equal(limited(rows[:2], k[:2], None), torch.stack(alone[:2]))
    from vllm.v1.worker.gpu.sample import states

    hooked = states.apply_top_k_top_p
    compat.limit_rows_by_themselves()
    assert states.apply_top_k_top_p is hooked


def listed(rows: torch.Tensor, most: int | None, named: dict[int, list[int]]) -> Any:
    """What runner V1's sampler lists for rows of which it takes the best token."""
    from vllm.v1.sample.sampler import Sampler

    sampler: Any = Sampler()
    sampler.sample = lambda logits, _: (logits.argmax(-1), None)
    sampler.apply_logits_processors = lambda logits, *_: logits
    return sampler(rows, SimpleNamespace(max_num_logprobs=most, logprob_token_ids=named)).logprobs_tensors


@pytest.mark.parametrize(("most", "named"), [(3, {1: [5]}), (1, {0: [2, 4, 7], 2: [1]}), (None, {1: [0]})])
def test_tokens_that_one_row_names(
    rows: torch.Tensor, most: int | None, named: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compat.list_for_each_what_it_asked()
    monkeypatch.setattr(invariance, "_way", invariance.Way.ROWS)
    found = listed(rows / 30, most, named)
    for row in range(len(rows)):
        own = {0: named[row]} if row in named else {}
        want = listed(rows[row : row + 1] / 30, None if own else most, own)
        if want is None:
            continue
        width = want.logprobs.shape[1]
        assert torch.equal(found.logprob_token_ids[row, :width], want.logprob_token_ids[0])
        assert torch.equal(found.logprobs[row, :width], want.logprobs[0])
        assert found.selected_token_ranks[row] == want.selected_token_ranks[0]
    monkeypatch.setattr(invariance, "_way", invariance.Way.NONE)
    other = next(row for row in range(len(rows)) if row not in named)
    assert (listed(rows, most, named).logprobs[other, 1:] == IMPOSSIBLE).all()  # vLLM's way
