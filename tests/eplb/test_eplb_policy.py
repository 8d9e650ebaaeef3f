"""Placements hold every expert, keep what can stay, honour bounds, and are near the best there is."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_vllm.eplb.errors import EplbError
from deepinfer_vllm.eplb.moe_lb import moe_lb, rank_loads, replica_counts
from deepinfer_vllm.eplb.policy import place

shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(1, 5), st.integers(0, 3))


def skewed(seed: int, *shape: int, load: float = 50.0) -> np.ndarray:
    """[T, L, E]: log-normal popularity, drawn."""
    random = np.random.default_rng(seed)
    return random.poisson(load * random.lognormal(0, 1, shape[1:]), shape)


@given(shapes, st.integers(0, 2**32), st.sampled_from([0.0, 1.0, 50.0]), st.integers(0, 30))
def test_every_expert_has_a_slot_and_moves_are_bounded(
    shape: tuple[int, int, int, int, int], seed: int, load: float, most: int
) -> None:
    steps, layers, experts, ranks, more = shape
    physical = (-(-experts // ranks) + more) * ranks
    first, second = (skewed(seed + n, steps, layers, experts, load=load) for n in range(2))
    before = place(first, ranks, physical)
    after = place(second, ranks, physical, current=before)
    bounded = place(second, ranks, physical, current=before, max_moves=most)
    for placement in (before, after, bounded):
        assert placement.shape == (layers, physical)
        assert placement.dtype == np.int32
        assert (replica_counts(placement, experts) >= 1).all()
    assert (bounded != before).sum() <= most
    assert (place(first, ranks, physical) == before).all()
    assert (place(second, ranks, physical, current=before, max_moves=most) == bounded).all()


def test_without_leave_to_move_nothing_moves() -> None:
    before = place(skewed(1, 5, 2, 16), 4, 20)
    assert (place(skewed(2, 5, 2, 16), 4, 20, current=before, max_moves=0) == before).all()


def test_more_moves_balance_better() -> None:
    counts = skewed(3, 20, 4, 64, load=500)
    start = np.tile(np.arange(80, dtype=np.int32) % 64, (4, 1))
    balances = [
        moe_lb(rank_loads(counts, place(counts, 8, 80, current=start, max_moves=most), 8)) for most in (0, 16, 64, 320)
    ]
    assert balances == sorted(balances, reverse=True)
    assert balances[0] > 1.2 > 1.05 > balances[-1]


def test_what_is_balanced_stays_where_it_is() -> None:
    counts = skewed(4, 20, 2, 64, load=500)
    before = place(counts, 8, 80)
    assert (place(counts, 8, 80, current=before) == before).all()


def test_an_expert_that_stays_on_its_rank_keeps_its_slot() -> None:
    before = place(skewed(5, 10, 3, 24), 4, 28)
    after = place(skewed(6, 10, 3, 24), 4, 28, current=before)
    for old, new in zip(before.reshape(-1, 7), after.reshape(-1, 7), strict=True):
        for slot, expert in enumerate(old.tolist()):
            if old.tolist().count(expert) == new.tolist().count(expert):
                assert new[slot] == expert


@given(st.integers(0, 2**32), st.sampled_from([(2, 4), (2, 6), (4, 8)]), st.integers(4, 12), st.integers(0, 2))
def test_replicas_of_an_expert_are_on_one_node(seed: int, sizes: tuple[int, int], experts: int, more: int) -> None:
    nodes, ranks = sizes
    physical = (-(-experts // ranks) + more) * ranks
    first = place(skewed(seed, 6, 2, experts), ranks, physical, nodes=nodes)
    second = place(skewed(seed + 1, 6, 2, experts), ranks, physical, nodes=nodes, current=first)
    for layer in (*first, *second):
        node = np.arange(physical) // (physical // nodes)
        assert all(len(set(node[layer == expert])) == 1 for expert in range(experts))


def test_replicas_lie_on_different_ranks_where_there_are_enough() -> None:
    counts = np.ones((1, 1, 16), np.int64)
    counts[0, 0, 3] = 1000
    placed = place(counts, 8, 24)[0].reshape(8, 3)
    assert (placed == 3).any(1).all()
    assert (replica_counts(placed.reshape(1, -1), 16)[0] >= 1).all()


@pytest.mark.parametrize("counts", [np.zeros((3, 1, 6), int), np.ones((1, 1, 6), int)], ids=["no load", "equal"])
def test_loads_without_a_difference_need_no_rearrangement(counts: np.ndarray) -> None:
    start = np.array([[0, 1, 2, 3, 4, 5]], np.int32)
    assert (place(counts, 3, 6, current=start) == start).all()


@pytest.mark.parametrize(("ranks", "physical"), [(1, 7), (7, 7), (2, 8), (7, 21)])
def test_edges_of_sizes(ranks: int, physical: int) -> None:
    placed = place(skewed(8, 3, 2, 7), ranks, physical)
    assert (replica_counts(placed, 7) >= 1).all()


def test_one_expert_alone_fills_every_slot() -> None:
    assert (place(np.full((2, 1, 1), 9), 4, 8) == 0).all()


def test_it_separates_experts_that_are_busy_at_once() -> None:
    # Two pairs, each busy in every other step: by sums all four are alike.
    counts = np.tile([[[100, 100, 0, 0]], [[0, 0, 100, 100]]], (50, 1, 1))
    placed = place(counts, 2, 4)
    assert moe_lb(rank_loads(counts, placed, 2)) == 1.0
    assert moe_lb(rank_loads(counts, np.array([[0, 1, 2, 3]]), 2)) == 2.0


@pytest.mark.parametrize("seed", range(12))
def test_it_finds_nearly_the_best_of_all_placements(seed: int) -> None:
    counts = skewed(seed, 30, 1, 6, load=3000)
    best = np.inf
    for extra in combinations(range(6), 2):
        items = [*range(6), *extra]
        for first in combinations(range(8), 4):
            halves = [items[i] for i in first], [items[i] for i in range(8) if i not in first]
            if all(len(set(half)) == 4 for half in halves):
                best = min(best, moe_lb(rank_loads(counts, np.array([halves[0] + halves[1]]), 2)))
    assert best <= moe_lb(rank_loads(counts, place(counts, 2, 8), 2)) + 1e-9 <= best + 0.025


@given(shapes, st.integers(0, 2**32))
def test_loads_of_ranks_are_those_counted_one_by_one(shape: tuple[int, int, int, int, int], seed: int) -> None:
    steps, layers, experts, ranks, more = shape
    physical = (-(-experts // ranks) + more) * ranks
    counts = skewed(seed, steps, layers, experts)
    placed = place(counts, ranks, physical)
    slow = np.zeros((steps, layers, ranks))
    for step, layer, slot in product(range(steps), range(layers), range(physical)):
        expert = placed[layer, slot]
        slow[step, layer, slot // (physical // ranks)] += counts[step, layer, expert] / (placed[layer] == expert).sum()
    assert np.allclose(rank_loads(counts, placed, ranks), slow)
    total = slow.mean(-1).sum()
    assert moe_lb(slow) == pytest.approx(slow.max(-1).sum() / total if total else 1.0)


@pytest.mark.parametrize(
    ("counts", "ranks", "physical", "options", "said"),
    [
        (np.zeros((2, 3)), 1, 3, {}, "counts have shape [2, 3]"),
        (np.full((1, 1, 4), np.nan), 2, 4, {}, "NaN"),
        (np.full((1, 1, 4), -1), 2, 4, {}, "negative"),
        (np.array([[["a"]]]), 1, 1, {}, "no numbers"),
        (np.zeros((1, 1, 4)), 2, 5, {}, "5 slots on 2 ranks"),
        (np.zeros((1, 1, 4)), 1, 3, {}, "3 slots on 1 ranks"),
        (np.zeros((1, 1, 4)), 4, 4, {"nodes": 3}, "4 ranks on 3 nodes"),
        (np.zeros((1, 1, 4)), 2, 4, {"max_moves": 3}, "max_moves 3"),
        (np.zeros((1, 1, 4)), 2, 4, {"current": np.zeros((1, 3), int)}, "current has shape [1, 3]"),
        (np.zeros((1, 1, 4)), 2, 4, {"current": np.zeros((1, 4), int)}, "does not place each expert"),
    ],
)
def test_impossible_wishes_are_refused_in_one_line(
    counts: np.ndarray, ranks: int, physical: int, options: dict[str, object], said: str
) -> None:
    with pytest.raises(EplbError) as error:
        place(counts, ranks, physical, **options)  # type: ignore[arg-type]
    assert said in str(error.value)
    assert "\n" not in str(error.value)
