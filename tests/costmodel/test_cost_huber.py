"""The M-estimate of relative errors, by the conditions of its optimum and by what it is for."""

from typing import Any

import numpy as np
import pytest

from deepinfer_costmodel.huber import TURN, huber


def problem(seed: int, count: int) -> tuple[Any, ...]:
    """features [4, n], seconds [n], weights [n], prior [4]; some seconds are ten times theirs."""
    rng = np.random.default_rng(seed)
    features = np.stack([np.ones(count), *rng.lognormal(0, 1, (3, count))])
    true = rng.uniform(0.1, 1.0, 4) * (rng.random(4) < 0.7) + 1e-3
    seconds = true @ features * rng.lognormal(0, 0.05, count) * np.where(rng.random(count) < 0.1, 10.0, 1.0)
    return features, seconds, rng.uniform(0.1, 1.0, count), rng.uniform(0.05, 1.0, 4)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_near_it_errs_less(seed: int) -> None:
    features, seconds, weights, prior = problem(seed, 200)
    found = np.array(huber(features, seconds, weights, prior))
    assert (found >= 0).all()
    relative = features / seconds
    expected = prior @ relative
    order = np.argsort(expected)
    half = np.searchsorted(np.cumsum(weights[order]), 0.5 * weights.sum())
    start = prior / expected[order[half]]
    scale = np.clip(1.4826 * np.median(np.abs(found @ relative - 1)), 0.02, 0.3)
    pull = (relative**2).mean(axis=1)

    def loss(terms: Any) -> float:
        far = np.abs(terms @ relative - 1) / scale
        each = np.where(far <= TURN, 0.5 * far**2, TURN * far - 0.5 * TURN**2)
        return float(weights @ each + 0.5 * pull @ (terms - start) ** 2)

    least = loss(found)
    for at in range(4):
        for change in (0.02, -0.02):
            moved = found.copy()
            moved[at] = max(0.0, moved[at] + change * max(found[at], 0.05))
            assert loss(moved) >= least - 1e-6 * least


def test_one_in_ten_that_stalled_moves_it_little() -> None:
    features, seconds, weights, prior = problem(1, 400)
    found = np.array(huber(features, seconds, weights, prior))
    usual = np.median(found @ features / seconds)
    assert usual == pytest.approx(1.0, abs=0.05)


def test_the_first_observation_of_its_kind_is_believed() -> None:
    """Trimming takes it for an outlier: a hundred short ones say nothing of the long one's coefficient."""
    features = np.ones((2, 101))
    features[1] = [*[0.0] * 100, 1.0]
    seconds = np.array([*[1.0] * 100, 31.0])
    found = huber(features, seconds, np.ones(101), np.array([1.0, 1.0]))
    assert found is not None and sum(found) == pytest.approx(31.0, rel=0.05)


def test_what_nothing_speaks_of_stays_as_the_prior_has_it() -> None:
    features = np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    found = huber(features, np.array([0.3, 0.5, 0.7]), np.ones(3), np.array([2.0, 6.0, 4.0]))
    assert found == pytest.approx([0.1, 0.3, 0.2], rel=0.02)


def test_numbers_beyond_floats_have_no_answer() -> None:
    features = np.array([[1e-200, 1e-200], [1e200, 1e200]])
    assert huber(features, np.array([1e-300, 1.0]), np.ones(2), np.ones(2)) is None
