"""Intervals and pass@k against closed forms, enumeration and simulation."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_vllm.evaluation.intervals import Estimate, clustered, wilson
from deepinfer_vllm.evaluation.pass_at_k import pass_at_k, reported

Z = 1.959963984540054


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    # All but the first are the examples of Newcombe 1998 (Statist. Med. 17:857), table I, method 3.
    [(8, 10, 0.4901625, 0.9433178), (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(right: int, of: int, low: float, high: float) -> None:
    found = wilson(right / of, of)
    assert (found.mean, found.low, found.high) == pytest.approx((right / of, low, high), abs=5e-5)


@given(st.integers(1, 10_000), st.data(), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
def test_the_ends_of_wilson_solve_its_equation(trials: int, data: st.DataObject, confidence: float) -> None:
    """Both ends are the proportions from which the mean is z standard errors away."""
    from statistics import NormalDist

    mean = data.draw(st.integers(0, trials)) / trials
    found = wilson(mean, trials, confidence)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    assert 0 <= found.low <= mean <= found.high <= 1
    for end in (found.low, found.high):
        assert abs(mean - end) == pytest.approx(z * sqrt(end * (1 - end) / trials), abs=1e-9)


def test_wilson_at_the_borders() -> None:
    """All right of n: the lower end is n / (n + z²)."""
    assert wilson(1.0, 50) == Estimate(1.0, pytest.approx(50 / (50 + Z * Z)), 1.0)
    assert wilson(0.0, 50) == Estimate(0.0, 0.0, pytest.approx(Z * Z / (50 + Z * Z)))
    for mean, trials in ((0.5, 0), (1.1, 5), (-0.1, 5)):
        with pytest.raises(ValueError, match="no interval"):
            wilson(mean, trials)


@given(st.lists(st.booleans(), min_size=1))
def test_one_sample_is_wilson(right: list[bool]) -> None:
    assert clustered([float(r) for r in right], 1) == wilson(sum(right) / len(right), len(right))


def test_equal_samples_of_an_item_count_once_and_independent_ones_each() -> None:
    assert clustered([1.0, 0.0] * 20, 8) == wilson(0.5, 40)
    assert clustered([0.5] * 40, 8) == wilson(0.5, 320)
    found = clustered([0.25, 0.5, 0.75, 0.5] * 10, 8)  # SE² = 20 / 16 / (40 * 39), and 1/4 of 1 / SE² is 312
    assert (found.low, found.high) == pytest.approx((wilson(0.5, 312).low, wilson(0.5, 312).high))
    assert clustered([0.5], 4) == wilson(0.5, 1)
    for bad in ([], [1.5], [-0.5, 1.0]):
        with pytest.raises(ValueError, match="one an item"):
            clustered(bad, 2)


@given(st.lists(st.fractions(0, 1, max_denominator=16).map(float), min_size=1), st.integers(2, 16))
def test_an_interval_holds_its_mean(values: list[float], samples: int) -> None:
    found = clustered(values, samples)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    one = wilson(found.mean, len(values))
    assert one.low <= found.low + 1e-12 and found.high <= one.high + 1e-12


@pytest.mark.parametrize("samples", [1, 4])
def test_intervals_cover_the_truth(samples: int) -> None:
    """Items of unlike difficulty, 60 in each of 2,000 runs: 95 % of the intervals hold the mean of all items."""
    rng, held = Random(samples), 0
    for _ in range(2000):
        levels = [rng.betavariate(1.4, 0.6) for _ in range(60)]  # mean 0.7
        values = [sum(rng.random() < level for _ in range(samples)) / samples for level in levels]
        found = clustered(values, samples)
        held += found.low <= 0.7 <= found.high
    assert 0.93 < held / 2000 < 0.97


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    subsets = list(combinations(range(samples), k))
    right = sum(any(sample < correct for sample in subset) for subset in subsets)
    assert pass_at_k(samples, correct, k) == float(Fraction(right, len(subsets)))


def test_pass_at_k_is_exact_for_many_samples_and_unbiased() -> None:
    assert pass_at_k(100_000, 1, 50_000) == 0.5
    assert pass_at_k(10, 3, 1) == 0.3 and pass_at_k(10, 0, 10) == 0.0 and pass_at_k(10, 1, 10) == 1.0
    rng, level, k, draws = Random(0), 0.3, 3, 20_000
    mean = sum(pass_at_k(6, sum(rng.random() < level for _ in range(6)), k) for _ in range(draws)) / draws
    assert mean == pytest.approx(1 - (1 - level) ** k, abs=4 * 0.5 / sqrt(draws))
    for samples, correct, k in ((5, 6, 1), (5, -1, 1), (5, 1, 0), (5, 1, 6)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(samples, correct, k)


def test_which_k_are_reported() -> None:
    assert {n: reported(n) for n in (1, 2, 5, 8)} == {1: [1], 2: [1, 2], 5: [1, 2, 4, 5], 8: [1, 2, 4, 8]}
