"""Corrections of chances, beside a plain logistic regression; and expectations, beside plain means."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_vllm.spec_decode.budget import ranked, survival
from deepinfer_vllm.spec_decode.expectation import Expectation
from deepinfer_vllm.spec_decode.outcomes import Outcomes


def logit(chance: np.ndarray) -> np.ndarray:
    return np.log(chance / (1.0 - chance))


def drafts_of(random: np.random.Generator, requests: int, slope: float, shift: float) -> tuple[np.ndarray, ...]:
    """Chances [R, 3] that are said, drafts verified and accepted [R] by the true ones."""
    true = 1.0 / (1.0 + np.exp(-(1.0 + 1.5 * random.standard_normal((requests, 3)))))
    said = 1.0 / (1.0 + np.exp(-(logit(true) - shift) / slope))
    drafts = random.integers(0, 4, requests)
    stands = (random.random((requests, 3)) < true) & (np.arange(3) < drafts[:, None])
    return said, drafts, np.cumprod(stands, axis=1).sum(axis=1)


def regression(said: np.ndarray, stands: np.ndarray) -> tuple[float, float]:
    """Slope and shift of most likelihood, by Newton's method on all data."""
    features = np.stack([logit(said), np.ones_like(said)])
    found = np.array([1.0, 0.0])
    for _ in range(30):
        expected = 1.0 / (1.0 + np.exp(-found @ features))
        found += np.linalg.solve((features * expected * (1 - expected)) @ features.T, features @ (stands - expected))
    return float(found[0]), float(found[1])


@pytest.mark.parametrize(("slope", "shift"), [(1.0, 0.0), (0.6, -0.5), (1.6, 0.7)])
def test_it_finds_what_a_regression_finds(slope: float, shift: float) -> None:
    random, outcomes = np.random.default_rng(1), Outcomes()
    seen = [drafts_of(random, 60, slope, shift) for _ in range(300)]
    for step in seen:
        outcomes.saw(*step)
    said, drafts, accepted = (np.concatenate(part) for part in zip(*seen[150:], strict=True))
    for position in range(3):
        tried = (drafts > position) & (accepted >= position)
        by_all = regression(said[tried, position], accepted[tried] > position)
        probes = np.full((3, 3), [[0.3], [0.7], [0.9]])
        expected = 1.0 / (1.0 + np.exp(-(by_all[0] * logit(probes[:, 0]) + by_all[1])))
        np.testing.assert_allclose(outcomes.corrected(probes)[:, position], expected, atol=0.04)


def test_the_order_of_drafts_stays_and_ends_stay_ends() -> None:
    random, outcomes = np.random.default_rng(2), Outcomes()
    for _ in range(200):
        said = random.random((8, 3))
        outcomes.saw(said, np.full(8, 3), random.integers(0, 4, 8))
    rising = np.repeat(np.linspace(0.0, 1.0, 50)[:, None], 3, axis=1)
    found = outcomes.corrected(rising)
    assert (np.diff(found, axis=0) >= 0.0).all()
    assert found[0].tolist() == [0.0] * 3 and found[-1].tolist() == [1.0] * 3


def test_one_chance_for_all_becomes_the_acceptance_rate() -> None:
    random, outcomes = np.random.default_rng(3), Outcomes()
    said, drafts = np.full((32, 2), 0.8), np.full(32, 2)
    for _ in range(400):
        outcomes.saw(said, drafts, np.cumprod(random.random((32, 2)) < (0.6, 0.3), axis=1).sum(axis=1))
    np.testing.assert_allclose(outcomes.corrected(said)[0], [0.6, 0.3], atol=0.05)


def test_what_is_no_number_does_not_spoil_it() -> None:
    outcomes = Outcomes()
    outcomes.saw(np.full((4, 2), np.nan), np.full(4, 2), np.full(4, 1))
    assert np.isfinite(outcomes.corrected(np.full((1, 2), 0.5))).all()


def test_expected_tokens_are_a_fading_mean_of_the_best_sums() -> None:
    random, expected = np.random.default_rng(4), Expectation()
    assert not expected.known
    weights, sums = [], []
    for _ in range(30):
        requests = int(random.choice([8, 16, 32]))
        alive = survival(random.random((requests, 4)), np.full(requests, 4))
        expected.saw(ranked(alive), requests)
        weights = [0.5 ** (1 / 45) * weight for weight in weights] + [requests]
        best = np.concatenate(([0.0], np.cumsum(sorted(alive.flatten(), reverse=True)))) / requests
        sums.append(np.interp(np.linspace(0.0, 1.0, 65), np.linspace(0.0, 1.0, len(best)), best))
    drafts, tokens = expected.tokens(64)
    assert drafts.tolist() == list(range(0, 257, 4)) and expected.known
    np.testing.assert_allclose(tokens, 64 + 64 * np.average(sums, axis=0, weights=weights), rtol=1e-6)


def test_a_mix_is_half_of_each() -> None:
    expected = Expectation()
    expected.saw(ranked(np.full((8, 4), 0.5)), 8)
    np.testing.assert_allclose(expected.mixed(np.linspace(0.9, 0.1, 12)), np.linspace(0.7, 0.3, 12))
