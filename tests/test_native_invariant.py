"""Compiled operations of the batch-invariant mode: what they compute, and that a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_vllm.models.deepseek_v41 import compressor, experts, gather_attention, mhc, rope
from deepinfer_vllm.native import invariance, invariant
from small_model import normal

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operation:
    """`rows(n)`: the first n rows of what it is given; `compute` and `reference`: of these, by row."""

    rows: Callable[[int], Tensors]
    compute: Callable[..., Any]
    reference: Callable[..., Any]
    atol: float = 2e-5


MANY = 97
HELD = {kind: normal(7, 43, 77).to(kind) for kind in (torch.float32, torch.bfloat16, torch.float16)}
EPS = 1e-6


def inputs(*shapes: tuple[int, ...]) -> Callable[[int], Tensors]:
    whole = [normal(number, MANY, *shape) for number, shape in enumerate(shapes)]
    return lambda count: tuple(tensor[:count] for tensor in whole)


CACHE, CHOICE = normal(8, 200, 40), torch.randint(-1, 200, (MANY, 30), generator=torch.Generator().manual_seed(3))
SINK, KEYS, FREQUENCIES = normal(9, 5), normal(10, 2, 37, 19), torch.rand(6) + 0.1
FN, BASE, SCALE = normal(11, 24, 132), normal(12, 24), normal(13, 3)


def attended(query: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return invariant.attention(query, (CACHE[:, :33], slots[:, :12]), (CACHE[:, :33], slots[:, 12:]), SINK, 0.3)


def attended_slowly(query: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return gather_attention.gather_attention(query, CACHE[slots.clamp_min(0), :33], slots >= 0, SINK, 0.3)


def scored_slowly(query: torch.Tensor, weight: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    products = torch.einsum("thd,tgd->thg", query.double(), KEYS[owner].double()).relu()
    return torch.einsum("th,thg->tg", weight.double(), products).float()


def gated(flat: torch.Tensor) -> Tensors:
    return invariant.hyper_gates(flat, FN, BASE, SCALE, 4, 1e-3, EPS)


def gated_slowly(flat: torch.Tensor) -> Tensors:
    part = mhc.HyperConnection(4, 33, 20, 1e-3, EPS)
    part.fn.data, part.base.data, part.scale.data = FN, BASE, SCALE
    pre, post, _ = part(flat.unflatten(-1, (4, 33)))
    mixes = flat @ FN.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    return pre, post, (mixes[:, 8:] * SCALE[2] + BASE[8:]).view(-1, 4, 4)


def rotated(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return invariant.rotate(x, *invariant.rotary(places, FREQUENCIES))


def rotated_slowly(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return rope.rotate(x, rope.RotaryTable(places, FREQUENCIES))


def engram_slowly(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    weighted = (x * normal(14, 4, 33) * key).sum(-1)
    norms = torch.rsqrt(x.square().mean(-1) + EPS) * torch.rsqrt(key.square().mean(-1) + EPS)
    dot = weighted * norms * 33**-0.5
    return torch.sigmoid(torch.copysign(dot.abs().clamp_min(EPS).sqrt(), dot))


def with_places(rows: Callable[[int], Tensors], places: torch.Tensor) -> Callable[[int], Tensors]:
    return lambda count: (*rows(count), places[:count])


PLACES = torch.randint(0, 1000, (MANY,), generator=torch.Generator().manual_seed(4))
OPERATIONS: dict[str, Operation] = {
    **{
        f"linear {kind}": Operation(
            inputs((77,)), lambda x, w=w: invariant.linear(x, w), lambda x, w=w: (x.double() @ w.double().T).float()
        )
        for kind, w in HELD.items()
    },
    "dots": Operation(inputs((77,), (77,)), invariant.dots, lambda a, b: (a * b).sum(-1)),
    "normalise": Operation(
        inputs((77,)), lambda x: invariant.normalise(x, EPS), lambda x: x * (x.square().mean(-1, True) + EPS).rsqrt()
    ),
    "attention": Operation(with_places(inputs((5, 33)), CHOICE), attended, attended_slowly),
    "head_scores": Operation(
        with_places(inputs((6, 19), (6,)), PLACES % 2),
        lambda q, w, owner: invariant.head_scores(q, w, KEYS, owner),
        scored_slowly,
    ),
    "sigmoid": Operation(inputs((9,)), invariant.sigmoid, torch.sigmoid),
    "sqrt_softplus": Operation(
        inputs((9,)), lambda x: invariant.sqrt_softplus(9 * x), lambda x: torch.nn.functional.softplus(9 * x).sqrt()
    ),
    "softmax": Operation(inputs((9,)), invariant.softmax, lambda x: torch.softmax(x, -1)),
    "swiglu": Operation(
        inputs((38,)),
        lambda x: invariant.swiglu(*x.chunk(2, -1), 1.5),
        lambda x: experts.swiglu(*x.chunk(2, -1), 1.5),
    ),
    "pool": Operation(inputs((3, 26)), invariant.pool, compressor.pool),
    "hyper_gates": Operation(inputs((132,)), gated, gated_slowly),
    "collapse": Operation(inputs((4, 33), (4,)), invariant.collapse, mhc.collapse),
    "expand": Operation(inputs((33,), (4, 33), (4,), (4, 4)), invariant.expand, mhc.expand),
    "rotate": Operation(with_places(inputs((3, 20)), PLACES), rotated, rotated_slowly, atol=2e-4),
    "engram_gates": Operation(
        inputs((4, 33), (4, 33)),
        lambda x, key: invariant.engram_gates(x, normal(14, 4, 33), key, EPS, EPS),
        engram_slowly,
    ),
    "sinkhorn": Operation(
        inputs((4, 4)), lambda x: mhc.sinkhorn(x, 20, 1e-3), lambda x: mhc.sinkhorn_in_torch(x, 20, 1e-3)
    ),
}


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    assert invariant.library() is not None, "these tests need a C compiler"
    assert not invariance.decided()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def results(found: Any) -> Tensors:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", OPERATIONS)
def test_as_the_slow_way(name: str) -> None:
    operation = OPERATIONS[name]
    given = operation.rows(MANY)
    for got, want in zip(results(operation.compute(*given)), results(operation.reference(*given)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=operation.atol)


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=25)
@given(data=st.data())
def test_a_row_has_its_own_bits(name: str, data: st.DataObject) -> None:
    """Any rows in any order, repeated too, on one thread or two."""
    operation = OPERATIONS[name]
    rows = torch.tensor(data.draw(st.lists(st.integers(0, MANY - 1), min_size=1, max_size=40)))
    torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
    given = operation.rows(MANY)
    whole = results(operation.compute(*given))
    some = results(operation.compute(*(tensor[rows] for tensor in given)))
    for part, full in zip(some, whole, strict=True):
        assert torch.equal(part, full[rows])


@settings(max_examples=15)
@given(rows=st.integers(1, 70), outputs=st.integers(1, 60), inputs=st.integers(1, 90), threads=st.sampled_from([1, 2]))
def test_products_of_any_shape(rows: int, outputs: int, inputs: int, threads: int) -> None:
    """Every output is one inner product; nor do the weight's other rows matter, as when ranks share them."""
    torch.set_num_threads(threads)
    x, weight = normal(1, rows, inputs), normal(2, outputs, inputs)
    got = invariant.linear(x, weight)
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    row, output = rows // 2, outputs // 2
    assert torch.equal(invariant.linear(x[row : row + 1], weight[output:]), got[row : row + 1, output:])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_every_half_is_widened(kind: torch.dtype) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(kind)
    finite = bits[bits.isfinite()]
    got = invariant.linear(torch.ones(1, 1), finite.unsqueeze(-1))
    assert torch.equal(got[0], finite.float())


def test_rows_that_do_not_count_are_not_there() -> None:
    """Nor is what nobody wrote: their places may hold NaN."""
    query, slots = normal(1, 3, 5, 33), CHOICE[:3].clone()
    poisoned = torch.cat((CACHE, torch.full((1, 40), float("nan"))))
    want = invariant.attention(query, (CACHE[:, :33], slots), None, SINK, 0.3)
    more = torch.cat((torch.full((3, 4), -1), slots, torch.full((3, 9), -1)), dim=1)
    assert torch.equal(invariant.attention(query, (poisoned[:, :33], more), None, SINK, 0.3), want)
    none = invariant.attention(query, (poisoned[:, :33], torch.full((3, 2), -1)), None, SINK, 0.3)
    assert torch.equal(none, torch.zeros_like(none))


def test_widths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of 8 with a weight of \[5, 9\]"):
        invariant.linear(normal(1, 2, 8), normal(2, 5, 9))


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_what_is_left_to_torch_keeps_rows_apart(rows: int) -> None:
    """What runners and samplers do with logits, ties among them."""
    logits = (3 * normal(1, MANY, 1000)).round() / 2
    for function in (
        lambda x: torch.log_softmax(x, -1, dtype=torch.float32),
        lambda x: torch.softmax(x, -1),
        lambda x: torch.topk(x, 8).indices,
        lambda x: x.argmax(-1),
        lambda x: x.sort(-1).indices,
        lambda x: x.softmax(-1).cumsum(-1),
    ):
        assert torch.equal(function(logits[5 : 5 + rows].clone()), function(logits)[5 : 5 + rows])
