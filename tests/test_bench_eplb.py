"""The rules that `make bench-eplb` compares are those they are called, and what measures them adds up."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from experts import generator, rivals  # noqa: E402
from experts.measure import hard_bound, noise_floor  # noqa: E402
from experts.replay import OURS, RIVALS, initial, replay  # noqa: E402
from experts.report import targets  # noqa: E402
from experts.scenes import PREFILL, Scene, scenes  # noqa: E402

from deepinfer_vllm.eplb.moe_lb import drawn_loads, moe_lb, rank_loads, replica_counts  # noqa: E402

SMALL = generator.Traffic(2000, 8, 2.0, topics=3, experts=24, top=2)


def loads(seed: int = 0) -> np.ndarray:
    return generator.loads(SMALL, np.arange(40), 3, seed)


@pytest.mark.vllm
def test_the_public_rule_balances_as_vllms_own_code_does() -> None:
    for seed in range(4):
        counts = loads(seed)
        first = initial(3, 28, 24)
        theirs = rivals.vllm_default(counts, 4, 28, first)
        ours = rivals.public_eplb(counts, 4, 28, first)
        assert (replica_counts(theirs, 24) == replica_counts(ours, 24)).all()
        # Equal loads may go to either of two ranks.
        for step in (rank_loads(counts.sum(0)[None], each, 4) for each in (theirs, ours)):
            assert np.allclose(np.sort(step), np.sort(rank_loads(counts.sum(0)[None], theirs, 4)))


def test_deepinfers_rule_takes_the_best_slot_each_time() -> None:
    steps = loads()[:, 0].T.astype(float)
    replicas = np.ones(24, np.int64)
    for _ in range(4):
        after = []
        for expert in range(24):
            more = replicas.copy()
            more[expert] += 1
            after.append((steps / more[:, None]).max(0).sum())
        replicas[int(np.argmin(after))] += 1
    placed = rivals.deepinfer(loads()[:, :1], 4, 28, initial(1, 28, 24))
    assert (replica_counts(placed, 24)[0] == replicas).all()


def test_every_rule_places_every_expert() -> None:
    for rule in RIVALS.values():
        assert (replica_counts(rule(loads(), 4, 28, initial(3, 28, 24)), 24) >= 1).all()


def test_drawn_loads_are_the_even_ones_on_average_and_lose_no_token() -> None:
    counts = loads()
    placed = rivals.public_eplb(counts, 4, 28, initial(3, 28, 24))
    even, drawn = rank_loads(counts, placed, 4), drawn_loads(counts, placed, 4)
    assert np.allclose(drawn.sum(-1), counts.sum(-1))
    assert np.abs(drawn.mean(0) - even.mean(0)).max() < 0.02 * even.mean()
    assert moe_lb(drawn) > moe_lb(even)


def test_bounds() -> None:
    counts = loads()
    assert 1.0 == hard_bound(counts, 4, 28) < noise_floor(counts, 4) < 1.1
    counts[:, :, 0] = 10 * counts.sum(-1)
    assert hard_bound(counts, 4, 24) > 3.5


def test_the_generator_repeats_itself_and_draws_every_choice() -> None:
    assert (loads(3) == loads(3)).all()
    assert (loads(3).sum(-1) == SMALL.tokens * SMALL.top).all()


def test_a_replay_measures_what_it_says() -> None:
    scene = Scene(SMALL, 4, **{**PREFILL, "redundant": 1, "window": 20, "interval": 40}, layers=2)
    assert scene.physical == 28
    assert scene.starts == [10, 50, 90]
    found = replay(scene, 0)
    assert {"vLLM", "public EPLB", "DeepInfer", OURS} <= found["rules"].keys()
    assert all(len(rule["parts"]) == 2 * 3 and rule["moe_lb"] >= 1 for rule in found["rules"].values())
    lines = targets({"a": {**found, "goal": 1.5}}, {"100 steps": 2.0})
    assert [line["name"] for line in lines if not line["met"] and "seconds" in line["name"]] == [
        "seconds of one core, 100 steps"
    ]
    assert lines[0] == {"name": "a: moe_lb", "value": found["rules"][OURS]["moe_lb"], "bound": 1.5, "met": True}


def test_scenes_are_those_of_the_published_settings() -> None:
    named = scenes()
    assert [named[f"plain, decode EP{ranks}"].physical for ranks in (8, 64)] == [392, 448]
    assert named["plain, prefill EP4"].physical == 400
    assert all(scene.traffic.tokens * scene.traffic.top // scene.ranks >= 240 for scene in named.values())
