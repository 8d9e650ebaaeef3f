"""Shares of engines, and which groups join their neighbours."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_router.shares import blocks, shares, whole

DEMAND = st.lists(st.sampled_from([0.0, 1e-9, 0.03, 0.5, 1.0, 7.0, 400.0]), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("demand", "engines", "expected"),
    [
        ([5, 31, 49, 15], 16, [1.0, 31 / 95 * 15, 49 / 95 * 15, 15 / 95 * 15]),
        ([1, 1, 2], 8, [2.0, 2.0, 4.0]),
        ([0, 0], 6, [3.0, 3.0]),
        ([0, 0, 1], 3, [1.0, 1.0, 1.0]),
    ],
)
def test_shares_follow_demand_with_one_for_each(demand: list[float], engines: int, expected: list[float]) -> None:
    assert shares(demand, engines) == pytest.approx(expected)


@given(DEMAND, st.integers(0, 60))
def test_shares_sum_up_and_are_fair(demand: list[float], spare: int) -> None:
    engines = len(demand) + spare
    parts = shares(demand, engines)
    assert sum(parts) == pytest.approx(engines)
    assert min(parts) >= 1 - 1e-9
    for (a, part_a), (b, part_b) in combinations(zip(demand, parts, strict=True), 2):
        if part_a > 1.001 and part_b > 1.001 and a and b:
            assert part_a / part_b == pytest.approx(a / b)
    counts = whole(parts)
    assert sum(counts) == engines
    assert all(count >= 1 and abs(count - part) < len(parts) for count, part in zip(counts, parts, strict=True))


def joined_by_search(active: list[bool], demand: list[float], engines: int) -> float:
    """The least that the busiest block can have, over all ways to cut the active groups into so many runs."""
    loads = [d for a, d in zip(active, demand, strict=True) if a]
    best = float("inf")
    for cuts in combinations(range(1, len(loads)), engines - 1):
        bounds = [0, *cuts, len(loads)]
        best = min(best, max(sum(loads[i:j]) for i, j in zip(bounds, bounds[1:], strict=False)))
    return best


@given(st.data(), DEMAND, st.integers(1, 10))
def test_blocks_are_neighbours_and_few_enough(data: st.DataObject, demand: list[float], engines: int) -> None:
    active = data.draw(st.lists(st.booleans(), min_size=len(demand), max_size=len(demand)))
    result = blocks(active, demand, engines)
    assert [g for block in result for g in block] == list(range(len(demand)))
    assert len(result) == max(1, min(engines, sum(active)))
    if len(result) < sum(active):  # joined greedily: at worst twice the best
        busiest = max(sum(demand[g] for g in block if active[g]) for block in result)
        assert busiest <= 2 * joined_by_search(active, demand, engines) + 1e-6


def test_blocks_without_demand_go_up_then_down() -> None:
    assert blocks([False, True, False, True], [0, 1, 0, 1], 4) == [[0, 1], [2, 3]]
    assert blocks([True, False, False], [1, 0, 0], 4) == [[0, 1, 2]]
    assert blocks([False, False], [0, 0], 2) == [[0, 1]]
    assert blocks([True] * 4, [1, 1, 5, 2], 2) == [[0, 1], [2, 3]]
