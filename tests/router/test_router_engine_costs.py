"""Costs by kind of engine, and what they learn from."""

import json
from pathlib import Path
from random import Random

import pytest

from deepinfer_costmodel.cost import Cost
from deepinfer_costmodel.priors import PUBLISHED
from deepinfer_costmodel.table import CostTable, read_table
from deepinfer_router.engine_costs import EngineCosts
from deepinfer_router.errors import RouterConfigError
from deepinfer_router.metrics import REGISTRY
from deepinfer_router.prefill import PrefillPolicy
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_router.prefill_gauges import publish, status
from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work

OTHER = Cost(0.2, 1e-4, 1e-9)


def test_kinds_start_from_the_table(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(CostTable({"default": PUBLISHED, "b": OTHER}, {"default": "p", "b": "m"}).to_json()))
    costs = EngineCosts.from_config(PrefillConfig(costs_file=path))
    assert (costs.of("b"), costs.of("a")) == (OTHER, PUBLISHED)
    assert EngineCosts.from_config(PrefillConfig()).of("") == PUBLISHED


def test_a_table_that_cannot_be_used_is_said_early(tmp_path: Path) -> None:
    with pytest.raises(RouterConfigError, match=r"costs_file.*nothing\.json"):
        EngineCosts.from_config(PrefillConfig(costs_file=tmp_path / "nothing.json"))
    with pytest.raises(RouterConfigError, match="default"):
        EngineCosts(CostTable({"b": OTHER}, {"b": "m"}))


def test_learns_from_engines_that_had_nothing_else_to_do() -> None:
    costs, rng = EngineCosts(), Random(1)
    for i in range(400):
        q = rng.randint(100, 20_000)
        costs.observe("b", q, 0, 0.0, OTHER.seconds(q, 0), now=float(i))
        costs.observe("b", q, 0, 0.1, 50.0, now=i + 0.5)  # waited for who knows what
    assert costs.of("b").seconds(10_000, 0) == pytest.approx(OTHER.seconds(10_000, 0), rel=0.05)
    assert costs.of("a") == PUBLISHED


def test_learns_from_those_that_waited_where_there_are_no_others() -> None:
    costs, rng = EngineCosts(), Random(1)
    for i in range(400):
        q = rng.randint(100, 20_000)
        costs.observe("b", q, 0, 0.05, OTHER.seconds(q, 0) + 0.05, now=float(i))
        costs.observe("b", q, 0, 1000.0, 1001.0, now=i + 0.5)  # the estimate's error would be all of it
    assert costs.of("b").seconds(10_000, 0) == pytest.approx(OTHER.seconds(10_000, 0), rel=0.05)


def test_takes_so_many_a_second_but_all_that_are_long() -> None:
    costs = EngineCosts()
    for i in range(1000):
        costs.observe("", 100, 0, 0.0, 0.1, now=i * 0.001)
    assert costs.fits[""].observations == 20
    for i in range(5):
        costs.observe("", 100_000, 0, 0.0, 60.0, now=1.0 + i * 0.001)
    assert costs.fits[""].observations == 25


def test_fit_can_be_switched_off() -> None:
    costs = EngineCosts(fit=False)
    for i in range(100):
        costs.observe("", 100, 0, 0.0, 7.0, now=float(i))
    assert costs.of("") == PUBLISHED


def test_what_was_learnt_can_be_written_and_read(tmp_path: Path) -> None:
    costs = EngineCosts()
    for i in range(100):
        costs.observe("b", 1000, 0, 0.0, 7.0, now=float(i))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs.table().to_json()))
    again = EngineCosts(read_table(path))
    assert again.of("b") == costs.of("b")
    assert again.of("a") == PUBLISHED


def test_policy_learns_and_shows() -> None:
    policy = PrefillPolicy(PrefillConfig(), EngineCosts())
    engine = Engine("e", "http://e:1", kind="b", models=("m",))
    engine.targets = targets = [Target(engine)]
    rng = Random(1)
    for i in range(200):
        work = Work(prompt_tokens=rng.randint(100, 20_000), hit_tokens=50)
        pick = policy.pick(work, targets, float(i), rng)
        assert pick is not None
        policy.served(pick, work, OTHER.seconds(work.prompt_tokens - 50, 50), float(i))
    assert policy.costs.of("b").seconds(9_950, 50) == pytest.approx(OTHER.seconds(9_950, 50), rel=0.05)

    stop = publish(policy)
    try:
        families = {family["name"]: dict(_children(family)) for family in REGISTRY.snapshot()}
    finally:
        stop()
    assert families["deepinfer_router_prefill_group_engines"]["m whole", "<16K"] == 1
    assert families["deepinfer_router_prefill_cost"]["b", "alpha"] == policy.costs.of("b").alpha
    assert families["deepinfer_router_prefill_cost_observations"]["b",] == 200
    shown = status(policy)
    assert json.loads(json.dumps(shown)) == shown
    assert shown["groups"][3] == {"models": ["m"], "group": ">=256K", "engines": ["e"], "demand": 0.0}


def _children(family: dict[str, object]) -> list[tuple[tuple[str, ...], float]]:
    return [(tuple(values), value) for values, value in family["children"]]  # type: ignore[attr-defined]
