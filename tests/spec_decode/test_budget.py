"""Budgets of verification against every choice there is, and against the paper's algorithm as it is written."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_vllm.spec_decode.budget import allot, convex_floor, delayed, early_stop, filled, ranked, survival

CHANCES = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.5, 0.8, 0.95, 1.0])


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Survivals [R, S] of a small batch, and how many of its requests sample."""
    requests, positions = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    row = st.lists(CHANCES, min_size=positions, max_size=positions)
    confidences = np.array(draw(st.lists(row, min_size=requests, max_size=requests)))
    scheduled = np.array(draw(st.lists(st.integers(0, positions), min_size=requests, max_size=requests)))
    return survival(confidences, scheduled), draw(st.integers(0, requests))


@st.composite
def costs(draw: st.DrawFn, drafts: int) -> np.ndarray:
    """Seconds [drafts + 1] that never fall: smooth, with steps, or flat."""
    rises = st.sampled_from([0.0, 0.0, 0.01, 0.1, 1.0])
    return 1.0 + np.cumsum([0.0, *draw(st.lists(rises, min_size=drafts, max_size=drafts))])


def paper(alive: np.ndarray, sampling: int, seconds: np.ndarray) -> int:
    """Algorithm 1, line by line."""
    candidates = sorted(alive.flatten().tolist(), reverse=True)[: len(seconds) - 1]
    tokens, best, verified = float(sampling), sampling / seconds[0], 0
    for chance in candidates:
        rate = (tokens + chance) / seconds[verified + 1]
        if rate <= best:
            break
        tokens, best, verified = tokens + chance, rate, verified + 1
    return verified


def every_choice(alive: np.ndarray) -> list[tuple[int, ...]]:
    return list(product(*(range(alive.shape[1] + 1) for _ in alive)))


def gain(alive: np.ndarray, drafts: tuple[int, ...]) -> float:
    return float(sum(row[:count].sum(dtype=np.float64) for row, count in zip(alive, drafts, strict=True)))


def test_survival_is_a_product_and_ends_with_what_is_scheduled() -> None:
    confidences = np.array([[0.5, 0.5, 0.5], [0.9, np.nan, 0.9], [1.5, -1.0, 0.5]], dtype=np.float32)
    found = survival(confidences, np.array([2, 3, 3]))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[0.5, 0.25, 0.0], [np.float32(0.9), 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert confidences[0, 2] == 0.5, "the caller's array is as it was"


@settings(deadline=None)
@given(st.data())
def test_early_stop_is_the_papers_algorithm(data: st.DataObject) -> None:
    alive, sampling = data.draw(batches())
    seconds = data.draw(costs(data.draw(st.integers(0, alive.size))))
    assert early_stop(ranked(alive), sampling, seconds) == paper(alive, sampling, seconds)


@settings(deadline=None)
@given(st.data())
def test_delayed_is_the_best_of_all_choices(data: st.DataObject) -> None:
    alive, sampling = data.draw(batches())
    seconds = data.draw(costs(alive.size))
    budget = delayed(ranked(alive), sampling, seconds)
    rates = [(sampling + gain(alive, choice)) / seconds[sum(choice)] for choice in every_choice(alive)]
    found = (sampling + gain(alive, tuple(allot(alive, budget)))) / seconds[budget]
    assert found == pytest.approx(max(rates), rel=1e-12)


@settings(deadline=None)
@given(st.data())
def test_allot_gains_most_for_its_budget(data: st.DataObject) -> None:
    alive, _ = data.draw(batches())
    budget = data.draw(st.integers(0, alive.size + 1))
    drafts = tuple(allot(alive, budget).tolist())
    assert sum(drafts) == min(budget, np.count_nonzero(alive))
    best = max(gain(alive, choice) for choice in every_choice(alive) if sum(choice) <= budget)
    assert gain(alive, drafts) == pytest.approx(best, abs=1e-12)


def test_equal_survivals_go_by_position_and_then_by_request() -> None:
    alive = np.array([[1.0, 1.0], [1.0, 0.5], [1.0, 1.0]])
    assert [allot(alive, budget).tolist() for budget in range(1, 7)] == [
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [2, 1, 2],
        [2, 2, 2],
    ]


def slow_floor(seconds: np.ndarray) -> list[float]:
    """At each place the least of all chords over it."""
    count = len(seconds)
    return [
        min(
            seconds[left] + (seconds[right] - seconds[left]) * (at - left) / max(1, right - left)
            for left in range(at + 1)
            for right in range(at, count)
        )
        for at in range(count)
    ]


@settings(deadline=None)
@given(st.integers(0, 24).flatmap(costs))
def test_convex_floor(seconds: np.ndarray) -> None:
    np.testing.assert_allclose(convex_floor(seconds), slow_floor(seconds), rtol=1e-12)


@settings(deadline=None)
@given(st.integers(0, 24).flatmap(costs), st.data())
def test_filled_costs_nothing_more(seconds: np.ndarray, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, len(seconds) - 1))
    last = filled(budget, seconds)
    assert seconds[last] == seconds[budget]
    assert last + 1 == len(seconds) or seconds[last + 1] > seconds[budget]


@settings(deadline=None)
@given(st.data())
def test_with_convex_costs_early_stop_finds_the_best_budget(data: st.DataObject) -> None:
    alive, sampling = data.draw(batches())
    rises = np.sort(data.draw(costs(alive.size)))[1:] - 1.0
    seconds = 1.0 + np.cumsum([0.0, *rises])
    tokens = sampling + np.cumsum([0.0, *np.sort(alive, axis=None)[::-1]])
    best = (tokens / seconds).max()
    budget = early_stop(ranked(alive), sampling, seconds)
    assert tokens[budget] / seconds[budget] == pytest.approx(best, rel=1e-12)


def test_early_stop_stays_below_a_padded_size_and_its_floor_does_not() -> None:
    alive = np.full((8, 1), 0.9)
    seconds = np.array([1.0, *[1.2] * 8])
    assert early_stop(ranked(alive), 2, seconds) == 8
    assert early_stop(ranked(alive), 8, seconds) == 0, "the first draft pays for all eight"
    budget = early_stop(ranked(alive), 8, convex_floor(seconds))
    assert budget == 8 and filled(1, seconds) == 8
