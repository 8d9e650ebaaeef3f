"""The search's sums are those of matrix products, and moments those of plain formulas."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_vllm.eplb.migration import affordable
from deepinfer_vllm.eplb.moe_lb import shares
from deepinfer_vllm.eplb.moments import MAX_ROWS, WANDER, second_moments
from deepinfer_vllm.eplb.search import improve, objective


def by_products(slots: np.ndarray, ranks: int, moments: np.ndarray) -> float:
    """What `objective` is."""
    parts = shares(slots[None], len(moments), ranks)[0]
    return float(np.einsum("ek,ef,fk->", parts, moments, parts))


@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 2), st.booleans(), st.integers(0, 2**32))
def test_each_change_gains_what_it_says(experts: int, ranks: int, more: int, by_node: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    physical = (-(-experts // ranks) + more) * ranks
    loads = random.poisson(random.gamma(0.5, 20, experts), (6, experts)).astype(float)
    moments = loads.T @ loads
    slots = np.concatenate([np.arange(experts), random.integers(0, experts, physical - experts)]).astype(np.int32)
    random.shuffle(slots)
    start, before = slots.copy(), by_products(slots, ranks, moments)
    assert np.isclose(objective(slots, ranks, moments), before)
    gains, moved = improve(slots, ranks, ranks if by_node else 1, moments, 1e-6 * before, 1000)
    assert (gains > 0).all()
    assert np.isclose(before - gains.sum(), by_products(slots, ranks, moments), rtol=1e-9, atol=1e-6)
    assert set(slots) == set(range(experts))
    assert len(moved) == 0 or moved[-1] == (slots != start).sum()
    first = start.copy()
    few, _ = improve(first, ranks, ranks if by_node else 1, moments, 1e-6 * before, 2)
    assert few.tolist() == gains[:2].tolist()


def test_sampling_leaves_nothing_but_the_mean_and_the_margin() -> None:
    # 100 steps of one distribution: the sample's covariances are all noise.
    random = np.random.default_rng(5)
    mean = random.dirichlet(np.full(32, 2.0))
    counts = random.multinomial(20_000, mean, 100)
    p = counts.sum(0) / counts.sum()
    expected = counts.sum() * (np.outer(p, p) + np.diag((WANDER * p) ** 2))
    rest = second_moments(counts) - expected
    assert np.abs(rest).max() < 0.002 * np.diag(expected).max()


def test_what_experts_have_in_common_is_kept() -> None:
    counts = np.tile([[90, 90, 10, 10], [10, 10, 90, 90]], (100, 1)).astype(np.int64)
    moments = second_moments(counts)
    expected = sum(np.outer(step, step) / step.sum() for step in counts.astype(float))
    off = ~np.eye(4, dtype=bool)
    assert np.allclose(moments[off], expected[off], rtol=0.05)


def test_many_steps_are_added_up_and_empty_ones_left_out() -> None:
    counts = np.ones((3 * MAX_ROWS, 4), np.int64)
    counts[: MAX_ROWS // 2 * 3] = 0
    assert np.isclose(second_moments(counts).sum(), counts.sum() * (1 + WANDER**2 / 4), rtol=1e-4)
    assert (second_moments(np.zeros((5, 4), int)) == 0).all()


def test_moves_go_where_they_gain_most_each() -> None:
    gains = [np.array([10.0, 1.0]), np.array([8.0, 6.0])]
    moved = [np.array([2, 4]), np.array([2, 4])]
    assert affordable(gains, moved, 8) == [2, 2]
    assert affordable(gains, moved, 6) == [1, 2]
    assert affordable(gains, moved, 4) == [1, 1]
    assert affordable(gains, moved, 3) == [1, 0]
    assert affordable(gains, moved, 0) == [0, 0]


def test_a_change_that_only_prepares_another_is_bought_with_it() -> None:
    assert affordable([np.array([1.0, 20.0])], [np.array([2, 3])], 2) == [0]
    assert affordable([np.array([1.0, 20.0])], [np.array([2, 3])], 3) == [2]
