"""cost(q, c) against a sum over single tokens, and its inverse against a search."""

import json
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_costmodel.cost import MAX_TOKENS, Cost, CostError, attended
from deepinfer_costmodel.priors import PUBLISHED

COEFFICIENTS = st.sampled_from([0.0, 1e-12, 3e-9, 1e-6, 5e-5, 1e-2])
COSTS = st.one_of(
    st.builds(Cost, alpha=COEFFICIENTS, beta=COEFFICIENTS, gamma=COEFFICIENTS),
    st.builds(
        Cost,
        alpha=COEFFICIENTS,
        beta=COEFFICIENTS,
        gamma=COEFFICIENTS,
        cap_tokens=st.integers(1, 5000),
        index=COEFFICIENTS,
    ),
)
TOKENS = st.integers(0, 1_000_000)


def summed(cost: Cost, q: int, c: int) -> float:
    """Token by token: the one at position x attends to x + 1/2 earlier ones, as half of itself counts."""
    total = cost.alpha
    for x in range(c, c + q):
        scanned = x + 0.5
        within = scanned if cost.cap_tokens is None else min(scanned, cost.cap_tokens)
        total += cost.beta + cost.gamma * within + cost.index * scanned
    return total


@given(COSTS, st.integers(0, 400), st.integers(0, 6000))
def test_formula_is_the_sum_over_tokens(cost: Cost, q: int, c: int) -> None:
    assert cost.seconds(q, c) == pytest.approx(summed(cost, q, c), rel=1e-9, abs=1e-15)


def test_formula_without_an_index() -> None:
    assert Cost(0.5, 2e-3, 4e-6).seconds(1000, 3000) == pytest.approx(0.5 + 2.0 + 4e-6 * 1000 * 3500)


def test_prior_is_the_published_polynomial() -> None:
    k = 24.0
    assert PUBLISHED.seconds(1000 * k, 0) == pytest.approx(0.066 + 0.0570 * k + 0.004406 * k * k)


def test_attention_is_capped_and_the_index_is_not() -> None:
    cost = Cost(0.0, 0.0, 1e-6, cap_tokens=512, index=1e-9)
    near, far = cost.seconds(100, 1000), cost.seconds(100, 101_000)
    assert near == pytest.approx(1e-6 * 100 * 512 + 1e-9 * 100 * 1050)
    assert far - near == pytest.approx(1e-9 * 100 * 100_000)


@given(COSTS, TOKENS, TOKENS, TOKENS)
def test_chunks_add_up(cost: Cost, a: int, b: int, c: int) -> None:
    whole = cost.seconds(a + b, c) + cost.alpha
    assert cost.seconds(a, c) + cost.seconds(b, c + a) == pytest.approx(whole, rel=1e-9)


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(1, 1 << 20))
def test_attended_is_between_nothing_and_the_cap(q: int, c: int, cap: int) -> None:
    assert 0 <= attended(q, c, cap) <= min(q * cap, q * (c + q / 2))


@given(COSTS, TOKENS, st.sampled_from([1e-9, 1e-3, 0.2, 3.0, 1e4]), st.sampled_from([1, 100, 32_768, MAX_TOKENS]))
def test_inverse_is_the_largest_that_fits(cost: Cost, c: int, budget_s: float, most: int) -> None:
    q = cost.largest_q(c, budget_s, most)
    assert 0 <= q <= most
    if q:
        assert cost.seconds(q, c) <= budget_s
    if q < most:
        assert cost.seconds(q + 1, c) > budget_s * (1 - 1e-12)


def test_inverse_of_what_does_not_fit_and_of_no_budget() -> None:
    cost = Cost(0.1, 1e-3, 0.0)
    assert [cost.largest_q(0, budget) for budget in (nan, -1.0, 0.1, 0.10101, inf)] == [0, 0, 0, 1, MAX_TOKENS]
    assert Cost(0.0, 0.0, 0.0).largest_q(0, 0.0, 7) == 7


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"alpha": -1.0}, "alpha"),
        ({"beta": 57.0}, "milliseconds"),
        ({"gamma": nan}, "gamma"),
        ({"alpha": inf}, "alpha"),
        ({"index": 1e-9}, "without cap_tokens"),
        ({"cap_tokens": 0}, "cap_tokens"),
    ],
)
def test_coefficients_are_bounded(wrong: dict[str, float], word: str) -> None:
    with pytest.raises(CostError, match=word):
        Cost(**({"alpha": 0.0, "beta": 0.0, "gamma": 0.0} | wrong))  # type: ignore[arg-type]


@given(COSTS)
def test_json_round_trip(cost: Cost) -> None:
    assert Cost.from_json(json.loads(json.dumps(cost.to_json()))) == cost


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "deepinfer.cost/2"},
        {"unit": "milliseconds"},
        {"alpha": "1"},
        {"alpha": True},
        {"alpha": -1},
        {"cap_tokens": 1.5},
        {"more": 1},
    ],
)
def test_json_that_is_not_ours_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CostError):
        Cost.from_json(PUBLISHED.to_json() | change)


@pytest.mark.parametrize("value", [None, [], 3, {}, {"schema": "deepinfer.cost/1"}])
def test_json_of_another_shape_is_refused(value: object) -> None:
    with pytest.raises(CostError, match="exactly"):
        Cost.from_json(value)
