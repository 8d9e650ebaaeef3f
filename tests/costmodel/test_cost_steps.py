"""What whole steps take: the formula, its fit, and the file between two engines."""

import json
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import special_files
from deepinfer_costmodel.cost import Cost, CostError
from deepinfer_costmodel.priors import PUBLISHED
from deepinfer_costmodel.step import Load, StepCost
from deepinfer_costmodel.step_fit import StepFit
from deepinfer_costmodel.step_table import StepTable, read_step_table

PRIOR = StepCost.of(PUBLISHED)
ENGINES = {
    "accelerator": StepCost(Cost(0.012, 9e-6, 3e-11), 0.008, 4e-5, 1.5e-9, 2e-5),
    "CPU": StepCost(Cost(0.004, 3e-4, 6e-8), 0.003, 6e-4, 4e-8, 1e-4),
    "with an index": StepCost(Cost(0.02, 2e-5, 4e-9, cap_tokens=1024, index=5e-11), 0.015, 5e-5, 1e-9, 3e-5),
}
TOKENS, CONTEXTS = st.integers(1, 1 << 20), st.integers(0, 1 << 20)


def load_of(rng: Random, cap: int | None) -> Load:
    """A step with up to two prefills and up to 64 decodes."""
    decodes = rng.choice([0, 1, 8, 64])
    load = Load(decodes=decodes, context=sum(rng.randint(100, 8000) for _ in range(decodes)))
    for _ in range(rng.choice([0, 1, 1, 2] if decodes else [1, 2])):
        load = load.chunk(rng.choice([128, 256, 512, 1024, 4096]), rng.choice([0, 512, 4096, 32_768]), cap)
    return load


@given(q=TOKENS, c=CONTEXTS)
def test_one_prefill_alone_costs_what_the_formula_says(q: int, c: int) -> None:
    for cost in ENGINES.values():
        alone = Load().chunk(q, c, cost.prefill.cap_tokens)
        assert cost.seconds(alone) == pytest.approx(cost.prefill.seconds(q, c))


def test_parts_add_up() -> None:
    cost = ENGINES["CPU"]
    both = Load(decodes=3, context=500, embeds=7).chunk(100, 50, None).chunk(10, 0, None)
    expected = 0.003 + 2 * 0.001 + 110 * 3e-4 + (100 * 100 + 10 * 5) * 6e-8 + 3 * 6e-4 + 500 * 4e-8 + 7 * 1e-4
    assert cost.seconds(both) == pytest.approx(expected)
    assert cost.seconds(Load()) == 0.003


@pytest.mark.parametrize("name", ENGINES)
def test_fits_from_one_prior(name: str) -> None:
    true, rng = ENGINES[name], Random(1)
    cap = true.prefill.cap_tokens
    fit = StepFit(PRIOR if cap is None else StepCost.of(Cost(0.066, 5.7e-5, 1e-8, cap_tokens=cap, index=1e-10)))
    assert (fit.due, fit.error) == (False, None)
    refits = 0
    for _ in range(200):
        load = load_of(rng, cap)
        fit.observe(load, true.seconds(load) * rng.lognormvariate(0, 0.05))
        if fit.due:
            fit.refit()
            refits += 1
    assert 9 <= refits <= 20  # after 1, 2, 4, ... 64 observations, then every 64; sooner where it was far off
    assert fit.error is not None and fit.error < 0.08
    probes = [load_of(rng, cap) for _ in range(200)]
    assert sorted(abs(fit.cost.seconds(p) / true.seconds(p) - 1) for p in probes)[190] < 0.15


def test_a_surprise_brings_the_next_fit_forward() -> None:
    fit, load = StepFit(PRIOR), Load(decodes=4, context=1000)
    for _ in range(70):
        fit.observe(load, 0.01)
        if fit.due:
            fit.refit()
    for _ in range(4):
        fit.observe(load, 0.01)
    assert not fit.due  # the last was after 64
    fit.observe(load.chunk(4096, 0, None), 3.0)
    assert fit.due


def test_one_observation_sets_the_scale() -> None:
    fit, load = StepFit(PRIOR), Load(decodes=4, context=1000).chunk(128, 0, None)
    fit.observe(load, 0.001)
    fit.refit()
    assert fit.cost.seconds(load) == pytest.approx(0.001, rel=0.05)
    assert fit.cost.seconds(Load().chunk(4096, 0, None)) == pytest.approx(
        PRIOR.seconds(Load().chunk(4096, 0, None)) * 0.001 / PRIOR.seconds(load), rel=0.3
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, nan, inf, 1e9])
def test_what_cannot_be_is_counted_and_not_used(seconds: float) -> None:
    fit = StepFit(PRIOR)
    assert not fit.observe(Load(decodes=1), seconds)
    assert (fit.rejected, fit.observations, fit.due) == (1, 0, False)


@given(
    st.lists(
        st.tuples(TOKENS, CONTEXTS, st.integers(0, 4096), st.integers(0, 4096), st.floats(1e-9, 3600)),
        min_size=1,
        max_size=40,
    )
)
def test_coefficients_stay_legal_whatever_is_observed(observations: list[tuple[int, int, int, int, float]]) -> None:
    fit = StepFit(PRIOR)
    for q, c, decodes, embeds, seconds in observations:
        fit.observe(Load(decodes=decodes, context=c * decodes, embeds=embeds).chunk(q, c, None), seconds)
        fit.refit()
        assert fit.cost == StepCost.from_json(json.loads(json.dumps(fit.cost.to_json())))


def test_a_file_holds_the_sets_of_both_modes(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    first = StepTable({"full": ENGINES["CPU"]}, {"full": "a test"})
    both = first.having("replay", ENGINES["with an index"], "another")
    path.write_text(json.dumps(both.to_json()))
    found = read_step_table(path)
    assert found == both
    assert found.costs == {"full": ENGINES["CPU"], "replay": ENGINES["with an index"]}
    assert found.sources == {"full": "a test", "replay": "another"}
    assert found.having("full", ENGINES["accelerator"], "a third").costs["full"] == ENGINES["accelerator"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decode": -1.0}, "decode = -1.0 is not in 0..10 seconds"),
        ({"step": 1.0}, "step = 1.0 is more than alpha"),
        ({"step": "1"}, "step = '1' is not a number"),
        ({"unit": "ms"}, "in 'ms'; this reads"),
        ({"more": 1}, "need exactly schema, unit, prefill, step, decode, context, embed"),
        ({"prefill": {}}, "coefficients need exactly"),
    ],
)
def test_other_coefficients_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "costs.json"
    value = ENGINES["CPU"].to_json() | {"source": "a test"} | change
    path.write_text(json.dumps({"schema": "deepinfer.step-costs/1", "sets": {"full": value}}))
    with pytest.raises(CostError, match=f"{path}: costs 'full': .*{said}"):
        read_step_table(path)


@pytest.mark.parametrize("kind", special_files.KINDS)
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, kind: str) -> None:
    """A pipe would keep the reader waiting."""
    path = tmp_path / "costs.json"
    special_files.put(path, kind)
    with pytest.raises(CostError, match="no regular file"):
        read_step_table(path)
