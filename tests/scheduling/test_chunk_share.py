"""Where the target leaves prompts too little they get their least share of prefill, and where it does not, nothing
changes; and what the first steps do that know nothing. The clock is simulated: this is no timing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import TRUE, Engine, make, request, start

from deepinfer_costmodel.cost import Cost
from deepinfer_vllm.scheduling import scheduler as ours

DECODES, PROMPTS = 16, 6
PROMPT_TOKENS = 2500
KEY = "deepinfer_sched"


def loaded(engine: Engine) -> tuple[float, float]:
    """Prompts beside decodes that go on and on: tokens of prompts a second, and the 99th percentile between two tokens,
    both after some prompts to learn from."""
    engine.add(*(request(f"d{number}", 200 + 40 * number, 20_000) for number in range(DECODES)))
    for _ in range(20):
        engine.step()
    for part in ("learn", "p"):
        began_s = engine.now_s
        names = [f"{part}{number}" for number in range(PROMPTS)]
        engine.add(*(request(name, PROMPT_TOKENS, 1) for name in names))
        while not all(name in engine.answers for name in names):
            engine.step()
    waits = engine.intervals(began_s)
    return PROMPTS * PROMPT_TOKENS / (engine.now_s - began_s), waits[int(0.99 * len(waits))]


@pytest.fixture(scope="module")
def fixed() -> dict[int, tuple[float, float]]:
    """Of vLLM's scheduler by size of a step."""
    sizes = [32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096]
    given = ((size, make(cost_model=False, max_num_batched_tokens=size, max_num_seqs=24)) for size in sizes)
    return {size: loaded(Engine(scheduler, noise=0.05)) for size, scheduler in given}


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_target_that_cannot_be_kept_costs_prefill_no_more_than_said(
    monkeypatch: pytest.MonkeyPatch, settings: Any, fixed: dict[int, tuple[float, float]], share: float
) -> None:
    settings(TARGET_MS=5, GRID=8, PREFILL_SHARE=share)  # and decodes take 5
    rate, p99_s = loaded(start(monkeypatch, make(), noise=0.05))
    assert rate >= share * max(each for each, _ in fixed.values())
    assert p99_s <= 1.05 * min(slow_s for each, slow_s in fixed.values() if each >= rate)


def test_without_a_share_such_a_target_stops_prefill_nearly(
    monkeypatch: pytest.MonkeyPatch, settings: Any, fixed: dict[int, tuple[float, float]]
) -> None:
    settings(TARGET_MS=5, GRID=8, PREFILL_SHARE=0)
    rate, _ = loaded(start(monkeypatch, make(), noise=0.05))
    assert rate < 0.1 * max(each for each, _ in fixed.values())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_target_that_can_be_kept_is_kept_step_by_step_as_without_a_share(
    monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path, asynchronous: bool
) -> None:
    """From costs that are known: the first guesses may be that it cannot."""
    learnt = tmp_path / "costs.json"
    settings(TARGET_MS=20, COSTS=learnt)
    engine = start(monkeypatch, make(asynchronous=asynchronous), noise=0.05)
    loaded(engine)
    engine.scheduler.shutdown()
    ran = []
    for share in (0, 0.25, 0.6):
        settings(PREFILL_SHARE=share, COSTS=shutil.copy(learnt, tmp_path / f"{share}.json"))
        engine = start(monkeypatch, make(asynchronous=asynchronous), noise=0.05)
        loaded(engine)
        ran.append((engine.steps, engine.chunks, engine.token_times))
        reports = [report[KEY] for report in engine.reports if report and KEY in report]
        assert sum(report["counters"].get("least_share_steps", 0) for report in reports) == 0
    assert ran[0] == ran[1] == ran[2]


def test_a_target_that_cannot_be_kept_is_said_once(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    said: list[str] = []
    monkeypatch.setattr(ours.logger, "warning", lambda text, *values: said.append(text % values))
    settings(TARGET_MS=5, GRID=8)
    engine = start(monkeypatch, make())
    loaded(engine)
    (line,) = said
    assert line.startswith("DEEPINFER_VLLM_SCHED_TARGET_MS=5 cannot be kept: decodes alone take ")
    reports = [report[KEY] for report in engine.reports if report and KEY in report]
    steps = sum(report["counters"].get("least_share_steps", 0) for report in reports)
    assert steps > 2 * ours.TOLD_AFTER
    settings(TARGET_MS=1.3 * float(line.split("Set the first to ")[1].split(" or more")[0]))
    again = start(monkeypatch, make())
    loaded(again)
    assert len(said) == 1  # what it advises can be kept


@pytest.mark.parametrize("times", [0.01, 1.0, 100.0])
def test_the_first_steps_know_nothing_and_learn_soon(
    monkeypatch: pytest.MonkeyPatch, settings: Any, times: float
) -> None:
    """An engine that is a hundred times faster or slower than what is thought at first: the first chunk beside decodes
    is a piece of the grid, each is at most twice the largest before it, and soon the target is kept."""
    cost = Cost(TRUE.prefill.alpha * times, TRUE.prefill.beta * times, TRUE.prefill.gamma * times)
    scaled = {name: getattr(TRUE, name) * times for name in ("step", "decode", "context", "embed")}
    true = replace(TRUE, prefill=cost, **scaled)
    settings(TARGET_MS=30 * times)
    engine = start(monkeypatch, make(), true=true, noise=0.05)
    engine.add(*(request(f"d{number}", 1, 4000) for number in range(DECODES)))  # nothing of prompts is seen before
    for _ in range(5):
        engine.step()
    seen = len(engine.steps)
    engine.add(*(request(f"p{number}", 8000, 1) for number in range(12)))
    while "p11" not in engine.answers:
        engine.step()
    sizes = [load.tokens for load, _ in engine.steps[seen:] if load.chunks and load.decodes]
    assert 0 < sizes[0] <= 128
    assert all(size <= max(2 * max(sizes[:at]), 128) for at, size in enumerate(sizes) if at)
    late = [seconds for _, seconds in engine.steps[seen + 30 :]]
    over = [seconds for seconds in late if seconds > 1.15 * 0.03 * times]
    assert len(over) <= 0.02 * len(late)
