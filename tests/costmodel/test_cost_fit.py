"""Coefficients from observations: right where there are some, sane where there are none."""

from math import inf, nan
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_costmodel.cost import Cost
from deepinfer_costmodel.fit import OnlineFit
from deepinfer_costmodel.nnls import nnls
from deepinfer_costmodel.priors import PUBLISHED
from deepinfer_costmodel.robust import bisquare, fitted, weighted_quantile

ENGINES = {
    "fast": Cost(0.02, 1e-5, 1e-9),
    "slow": Cost(0.3, 2e-3, 3e-7),
    "linear": Cost(0.05, 1e-4, 0.0),
    "as published": PUBLISHED,
}
PROBES = [(500, 0), (2_000, 0), (20_000, 0), (200_000, 0), (1_000, 100_000), (1_000, 500_000)]


def size(rng: Random) -> tuple[int, int]:
    """Lengths from 64 to 800,000 tokens, part of them with a hit."""
    length = int(min(800_000, max(64, rng.lognormvariate(8.5, 1.5))))
    hit = int(length * rng.choice([0, 0, 0.5, 0.9])) // 64 * 64
    return max(1, length - hit), hit


def feed(fit: OnlineFit, true: Cost, rng: Random, count: int, noise: float, waits: float = 0.0) -> None:
    """`waits`: part of the observations that contain some seconds of waiting for others."""
    for _ in range(count):
        q, c = size(rng)
        seconds = true.seconds(q, c) * rng.lognormvariate(0, noise)
        fit.observe(q, c, seconds + (rng.expovariate(0.3) if rng.random() < waits else 0.0))


def worst(fit: OnlineFit, true: Cost) -> float:
    """Largest relative error at the probes."""
    return max(abs(fit.cost.seconds(q, c) / true.seconds(q, c) - 1) for q, c in PROBES)


@pytest.mark.parametrize("true", ENGINES.values(), ids=ENGINES)
def test_fits_from_one_prior(true: Cost) -> None:
    fit = OnlineFit(PUBLISHED)
    assert (fit.cost, fit.error) == (PUBLISHED, None)
    feed(fit, true, Random(1), 600, 0.05)
    assert worst(fit, true) < 0.12
    assert fit.error is not None
    assert fit.error < 0.06


@pytest.mark.parametrize("true", ENGINES.values(), ids=ENGINES)
def test_waiting_in_three_of_ten_observations_does_not_spoil_it(true: Cost) -> None:
    fit = OnlineFit(PUBLISHED)
    feed(fit, true, Random(2), 1200, 0.1, waits=0.3)
    assert worst(fit, true) < 0.35  # plain least squares: four times the true value, below


def test_plain_least_squares_would_be_spoilt() -> None:
    """Why it is robust: observations as above, fitted to the letter."""
    rng, true = Random(2), ENGINES["fast"]
    sizes = [size(rng) for _ in range(1200)]
    predicted = np.array([true.seconds(q, c) for q, c in sizes])
    waits = [rng.expovariate(0.3) if rng.random() < 0.3 else 0.0 for _ in sizes]
    relative = np.array([[1.0, q, q * (c + q / 2)] for q, c in sizes]) / predicted[:, None]
    plain = nnls((relative.T @ relative).tolist(), (relative.T @ (1 + waits / predicted)).tolist())
    assert Cost(*plain).seconds(500, 0) > 4 * true.seconds(500, 0)


def test_is_the_batch_solution_where_nothing_is_an_outlier() -> None:
    rng, true = Random(3), Cost(0.1, 2e-4, 5e-9)
    sizes = [size(rng) for _ in range(250)]
    features = np.array([[1.0, q, q * (c + q / 2)] for q, c in sizes])
    seconds = np.array([true.seconds(q, c) for q, c in sizes]) * [rng.uniform(0.99, 1.01) for _ in sizes]
    anchors = np.array([[1.0, 1e3, 1e6], [1.0, 1e5, 1e10]])
    columns = features.T.tolist()
    found = fitted(columns, seconds.tolist(), [1.0] * 250, anchors.T.tolist(), [0.066, 5.7e-5, 8.8e-9])
    batch, *_ = np.linalg.lstsq(features / seconds[:, None], np.ones(250), rcond=None)
    assert found is not None
    assert (batch > 0).all()
    np.testing.assert_allclose(features @ np.array(found), features @ batch, rtol=0.01)


def test_far_from_what_was_seen_the_priors_shape_holds() -> None:
    fit, rng = OnlineFit(PUBLISHED), Random(4)
    for _ in range(1000):  # short prompts only, by an engine three times as slow
        q = rng.randint(200, 3000)
        fit.observe(q, 0, 3 * PUBLISHED.seconds(q, 0) * rng.lognormvariate(0, 0.2))
    for q, c in PROBES:
        assert fit.cost.seconds(q, c) == pytest.approx(3 * PUBLISHED.seconds(q, c), rel=0.5)


def test_prompts_of_one_length_leave_the_shape_open() -> None:
    fit = OnlineFit(PUBLISHED)
    for _ in range(300):
        fit.observe(1000, 0, 0.5)
    assert fit.cost.seconds(1000, 0) == pytest.approx(0.5, rel=0.02)
    assert fit.cost.seconds(10_000, 0) == pytest.approx(
        PUBLISHED.seconds(10_000, 0) * 0.5 / PUBLISHED.seconds(1000, 0), rel=0.3
    )


def test_follows_an_engine_that_changes() -> None:
    fit, rng = OnlineFit(PUBLISHED), Random(5)
    feed(fit, PUBLISHED, rng, 1500, 0.05)
    slower = Cost(2 * PUBLISHED.alpha, 2 * PUBLISHED.beta, 2 * PUBLISHED.gamma)
    feed(fit, slower, rng, 1500, 0.05)
    assert worst(fit, slower) < 0.15
    assert fit.error is not None
    assert fit.error < 0.08


def test_a_few_long_prompts_among_many_short_ones_are_kept() -> None:
    fit, rng, true = OnlineFit(PUBLISHED), Random(6), Cost(0.066, 5.7e-5, 5e-8)
    for i in range(3000):
        q = 300_000 if i % 200 == 0 else rng.randint(100, 2000)
        fit.observe(q, 0, true.seconds(q, 0) * rng.lognormvariate(0, 0.05))
    assert fit.cost.seconds(300_000, 0) == pytest.approx(true.seconds(300_000, 0), rel=0.1)


def test_models_with_an_index_keep_their_cap() -> None:
    true = Cost(0.05, 3e-5, 2e-8, cap_tokens=1024, index=4e-10)
    fit = OnlineFit(Cost(0.066, 5.7e-5, 1e-8, cap_tokens=1024, index=1e-10))
    feed(fit, true, Random(7), 800, 0.03)
    assert fit.cost.cap_tokens == 1024
    assert worst(fit, true) < 0.1


@pytest.mark.parametrize(
    ("q", "c", "seconds"),
    [(0, 0, 1.0), (1, -1, 1.0), (1, 0, 0.0), (1, 0, -1.0), (1, 0, nan), (1, 0, inf), (1, 0, 1e9), (1 << 40, 0, 1.0)],
)
def test_what_cannot_be_is_counted_and_not_used(q: int, c: int, seconds: float) -> None:
    fit = OnlineFit(PUBLISHED)
    for _ in range(20):
        assert not fit.observe(q, c, seconds)
    assert (fit.rejected, fit.observations, fit.cost, fit.error) == (20, 0, PUBLISHED, None)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 24), st.integers(0, 1 << 24), st.floats(1e-9, 3600)), min_size=8, max_size=80
    )
)
def test_never_leaves_what_was_seen_behind(observations: list[tuple[int, int, float]]) -> None:
    """However mad they are: coefficients stay legal, and no prediction of one seen is far above all of them."""
    fit = OnlineFit(PUBLISHED)
    for q, c, seconds in observations:
        assert fit.observe(q, c, seconds)
    ratios = [seconds / PUBLISHED.seconds(q, c) for q, c, seconds in observations]
    for q, c, _ in observations:
        predicted = fit.cost.seconds(q, c)
        assert 0 <= predicted <= 100 * max(ratios) * PUBLISHED.seconds(q, c)


def test_memory_is_bounded() -> None:
    fit, rng = OnlineFit(PUBLISHED), Random(8)
    for _ in range(20_000):
        fit.observe(rng.randint(1, 1 << rng.randint(1, 24)), rng.randint(0, 1 << rng.randint(1, 24)), 1.0)
    assert len(fit._recent) < 1900


def test_weights_and_quantiles() -> None:
    np.testing.assert_allclose(bisquare([0.0, 4.685, 9.0]), [1, 0, 0])
    values, weights = [3.0, 1.0, 2.0], [1.0, 1.0, 5.0]
    assert [weighted_quantile(values, weights, part) for part in (0.1, 0.5, 0.99)] == [1.0, 2.0, 3.0]
