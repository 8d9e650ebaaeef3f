"""Cost tables: what is measured is answered, and live times move it as far as they should."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_vllm.spec_decode.cost_surface import CONTEXTS, CostSurface
from deepinfer_vllm.spec_decode.cost_table import CostTable

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)


def seconds(tokens: int, context: float) -> float:
    return 0.02 + 2e-5 * tokens + 1e-8 * context


def table(padded_to: int = 0, contexts: tuple[int, ...] = (0, 1_000_000)) -> CostTable:
    verify = [(size, context, seconds(size, context)) for size in SIZES for context in contexts]
    return CostTable.measured(verify, [(1, 0, 0.001), (64, 0, 0.002), (256, 0, 0.004)], padded_to)


def at(costs: CostTable, tokens: int, context: int = 0) -> float:
    return float(costs.verify_s(tokens, tokens, context)[0])


@pytest.mark.parametrize("tokens", [1, 3, 20, 64, 100, 700, 1024, 5000])
@pytest.mark.parametrize("context", [0, 1000, 4096, 300_000, 5_000_000])
def test_linear_costs_are_found_everywhere(tokens: int, context: int) -> None:
    assert at(table(), tokens, context) == pytest.approx(seconds(tokens, context), rel=1e-9)


def test_up_to_the_largest_graph_a_batch_costs_what_the_next_size_does() -> None:
    costs = table(padded_to=256)
    for first, last in ((49, 64), (65, 96), (193, 256)):
        np.testing.assert_allclose(costs.verify_s(first, last, 0), seconds(last, 0), rtol=1e-12)
    assert at(costs, 320) == pytest.approx(seconds(320, 0))


def test_lookups_agree() -> None:
    costs = table(padded_to=128)
    sizes = np.array([1, 60, 61, 200, 900, 3000])
    singly = [at(costs, int(size), 77_777) for size in sizes]
    np.testing.assert_array_equal(costs.verify_at_s(sizes, 77_777), singly)
    np.testing.assert_array_equal(costs.verify_s(50, 70, 9), [at(costs, size, 9) for size in range(50, 71)])
    assert costs.draft_s(160, 0) == pytest.approx(0.003)


def test_the_median_of_several_times_counts_and_what_cannot_be_a_time_does_not() -> None:
    times = [0.02, 0.021, 5.0, -1.0, float("nan"), float("inf")]
    surface = CostSurface.measured([(8, 0, each) for each in times])
    assert surface.between(8, 8, 0)[0] == pytest.approx(0.021)
    with pytest.raises(ValueError, match="no step was measured"):
        CostSurface.measured([(8, 0, -1.0)])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 10**8), st.floats(1e-5, 10.0)), min_size=1, max_size=40))
def test_more_tokens_or_context_never_cost_less(samples: list[tuple[int, int, float]]) -> None:
    surface = CostSurface.measured(samples[: len(samples) // 2 + 1])
    for sample in samples * 3:
        surface.observe(*sample)
    for context in (0, 5000, 10**6, 2 * 10**8):
        rows = surface.between(1, 400, context)
        assert (np.diff(rows) >= -1e-12 * rows[1:]).all() and np.isfinite(rows).all() and (rows > 0).all()
    size = int(surface.sizes[-1])
    assert (np.diff([surface.between(size, size, c)[0] for c in range(0, 10**7, 10**6)]) >= -1e-12).all()


def test_stalls_do_not_move_it() -> None:
    costs, random = table(), np.random.default_rng(1)
    for number in range(4000):
        tokens = int(random.integers(60, 400))
        late = 100.0 if number % 20 == 0 else 1.0
        costs.observe_verify(tokens, 0, seconds(tokens, 0) * late * float(np.exp(0.03 * random.standard_normal())))
    for tokens in (1, 60, 200, 400, 1024):
        assert at(costs, tokens) == pytest.approx(seconds(tokens, 0), rel=0.02)
    assert costs.error is not None and 0.01 < costs.error < 0.04


def test_a_burst_of_stalls_moves_it_by_a_bounded_part() -> None:
    costs = table()
    for _ in range(400):
        costs.observe_verify(200, 0, seconds(200, 0))
    for _ in range(10):
        costs.observe_verify(200, 0, 100 * seconds(200, 0))
    assert at(costs, 200) < 1.06 * seconds(200, 0)


@pytest.mark.parametrize("factor", [0.5, 1.5, 4.0])
def test_what_slows_everything_is_learnt_where_nothing_was_seen_as_well(factor: float) -> None:
    costs, random = table(), np.random.default_rng(2)
    for _ in range(3000):
        tokens = int(random.integers(150, 400))
        costs.observe_verify(tokens, 0, factor * seconds(tokens, 0))
    for tokens in (16, 150, 300, 1000):
        assert at(costs, tokens) == pytest.approx(factor * seconds(tokens, 0), rel=0.05)


def test_a_higher_price_of_tokens_is_learnt_where_nothing_was_seen_as_well() -> None:
    costs, random = table(), np.random.default_rng(3)
    for _ in range(3000):
        tokens = int(random.integers(150, 400))
        costs.observe_verify(tokens, 0, 0.02 + 1e-4 * tokens)
    for tokens in (32, 150, 300, 900):
        assert at(costs, tokens) == pytest.approx(0.02 + 1e-4 * tokens, rel=0.15)


def test_the_price_of_context_is_learnt_without_having_been_measured() -> None:
    costs = table(contexts=(0,))
    for _ in range(400):
        for tokens in (64, 128, 256):
            costs.observe_verify(tokens, 4**10, seconds(tokens, 4**10))
    assert at(costs, 200, 4**10) == pytest.approx(seconds(200, 4**10), rel=0.03)


def test_a_change_is_noticed_and_noise_is_not() -> None:
    costs, random = table(), np.random.default_rng(4)
    for _ in range(1000):
        costs.observe_verify(200, 0, seconds(200, 0) * float(np.exp(0.03 * random.standard_normal())))
    assert costs.surprises == 0
    for _ in range(5):
        costs.observe_verify(200, 0, 1.5 * seconds(200, 0))
    assert costs.surprises == 1


def slow_trend(surface: CostSurface, heard: np.ndarray) -> np.ndarray:
    """The same regression, node by node."""
    found = np.ones_like(surface.start)
    for column in range(len(CONTEXTS)):
        rows = []
        for size in range(len(surface.sizes)):
            for other in range(len(CONTEXTS)):
                near = np.exp(-((column - other) ** 2) / 2) + 0.02
                rows.append(
                    (
                        heard[size, other] * near,
                        surface.sizes[size] / surface.start[size, other],
                        np.exp(surface._log[size, other]),
                    )
                )
        weight, place, ratio = np.array(rows).T
        centre = (weight * place).sum() / weight.sum()
        away = place - centre
        slope = (weight * away * ratio).sum() / ((weight * away**2).sum() + 0.006 * centre**2)
        level = ((weight * ratio).sum() + 0.02) / (weight.sum() + 0.02)
        line = level + slope * (surface.sizes / surface.start[:, column] - centre)
        found[:, column] = np.clip(line, 0.2 * level, 5.0 * level)
    return found


def test_the_trend_is_the_ridge_regression_it_says_it_is() -> None:
    surface = CostSurface.measured([(size, 0, seconds(size, 0)) for size in SIZES])
    random = np.random.default_rng(5)
    heard = random.random(surface.start.shape)
    surface._log = 0.3 * random.standard_normal(surface.start.shape)
    np.testing.assert_allclose(surface._trend(heard), slow_trend(surface, heard), rtol=1e-9)


def test_tables_told_the_same_answer_the_same_and_survive_json() -> None:
    pair = [table(), table()]
    for costs in pair:
        random = np.random.default_rng(6)
        for _ in range(500):
            tokens = int(random.integers(1, 600))
            costs.observe_verify(tokens, int(random.integers(10**6)), float(random.random()))
            costs.observe_draft(tokens, 0, float(random.random()))
    read = CostTable.from_json(json.loads(json.dumps(pair[0].to_json())))
    for other in (pair[1], read):
        np.testing.assert_array_equal(other.verify_s(1, 3000, 5000), pair[0].verify_s(1, 3000, 5000))
        assert other.draft_s(99, 7) == pair[0].draft_s(99, 7)


@pytest.mark.parametrize("found", [{}, {"verify": {}, "draft": {}}, [], None, {"verify": 1, "draft": 2}])
def test_another_json_is_refused(found: object) -> None:
    with pytest.raises(ValueError, match="not a cost table"):
        CostTable.from_json(found)  # type: ignore[arg-type]


def test_memory_is_bounded() -> None:
    surface, random = CostSurface.measured([(size, 0, 0.01) for size in SIZES]), np.random.default_rng(7)
    for _ in range(5000):
        surface.observe(int(random.integers(1, 1024)), int(random.integers(10**8)), 0.01)
    assert sum(map(len, surface._pending.values())) <= 4 * surface.start.size


def test_steps_without_drafts_have_times_of_their_own() -> None:
    """Those with drafts take a half longer than was measured; both are believed, at sizes of both."""
    costs = table()
    assert costs.plain_s(200, 0) == pytest.approx(seconds(200, 0)), "as measured, until some were seen"
    for _ in range(200):
        costs.observe_verify(200, 0, 1.5 * seconds(200, 0))
        costs.observe_verify(800, 0, 1.5 * seconds(800, 0))
    assert costs.plain_s(200, 0) == pytest.approx(1.5 * seconds(200, 0), rel=0.02)
    for _ in range(25):
        costs.observe_plain(200, 0, seconds(200, 0))
    for requests in (130, 200, 40):  # by those of about as many, else by the nearest's
        assert costs.plain_s(requests, 0) == pytest.approx(seconds(requests, 0), rel=0.02)
    assert costs.verify_s(200, 200, 0)[0] == pytest.approx(1.5 * seconds(200, 0), rel=0.02)
    before = costs.surprises
    for _ in range(10):
        costs.observe_plain(200, 0, 2.0 * seconds(200, 0))
        costs.observe_plain(200, 0, float("nan"))
    assert costs.surprises > before and costs.plain_s(200, 0) > 1.5 * seconds(200, 0)
