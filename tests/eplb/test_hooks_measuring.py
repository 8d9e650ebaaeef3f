"""Loads step by step, what a rebalancing moved, traces of a running engine, and the watchdog."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_vllm.eplb import trace
from deepinfer_vllm.eplb.moves import moved_experts
from deepinfer_vllm.eplb.recorder import MAX_BYTES, MAX_STEPS, Recorder, step_limit
from deepinfer_vllm.eplb.stats import BalanceStats
from deepinfer_vllm.eplb.step_counts import StepCounts
from deepinfer_vllm.eplb.watchdog import Watchdog

LAYERS, EXPERTS, SLOTS, RANKS = 2, 3, 4, 2


def loads(seed: int, steps: int) -> torch.Tensor:
    return torch.randint(0, 9, (steps, LAYERS, SLOTS), generator=torch.Generator().manual_seed(seed)).int()


def test_the_last_steps_in_order_as_they_were_placed_then() -> None:
    """Placements change while the ring turns, once in one layer only; each step counts by its own."""
    counts = StepCounts(4, EXPERTS, SLOTS // RANKS)
    steps, generator = loads(1, 11), np.random.default_rng(1)
    experts, ranks = np.zeros((11, LAYERS, EXPERTS), int), np.zeros((11, LAYERS, RANKS), int)
    placement = np.array([[0, 1, 2, 0], [2, 1, 0, 1]])
    for number, load in enumerate(steps):
        if number % 3 == 2:
            placement[number % LAYERS] = generator.permutation([0, 1, 2, 2])
        counts.add(load, torch.from_numpy(placement))
        for layer in range(LAYERS):
            for slot in range(SLOTS):
                experts[number, layer, placement[layer, slot]] += int(load[layer, slot])
                ranks[number, layer, slot // 2] += int(load[layer, slot])
        first = max(0, number - 3)
        assert counts.expert_loads(4).tolist() == experts[first : number + 1].tolist()
        assert counts.rank_loads(4).tolist() == ranks[first : number + 1].tolist()
    assert counts.expert_loads(2).tolist() == experts[-2:].tolist()
    assert counts.expert_loads(99).shape == (4, LAYERS, EXPERTS)


def test_slots_that_hold_nothing_have_no_load() -> None:
    counts = StepCounts(2, EXPERTS, 2)
    counts.add(torch.full((1, 4), 5), torch.tensor([[0, -1, 1, 2]]))
    assert counts.expert_loads(1).tolist() == [[[5, 5, 5]]]


def test_another_number_of_ranks_begins_anew() -> None:
    counts = StepCounts(4, EXPERTS, 2)
    counts.add(torch.ones(1, 4, dtype=torch.int32), torch.tensor([[0, 1, 2, 0]]))
    counts.add(torch.ones(1, 6, dtype=torch.int32), torch.tensor([[0, 1, 2, 0, 1, 2]]))
    assert counts.added == 1 and counts.rank_loads(4).tolist() == [[[2, 2, 2]]]


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        ([[0, 1, 2, 0]], [[0, 1, 2, 0]], 0),
        ([[0, 1, 2, 0]], [[1, 0, 0, 2]], 0),  # within their ranks
        ([[0, 1, 2, 0]], [[2, 1, 0, 0]], 1),
        ([[0, 1, 2, 0]], [[2, 2, 1, 0]], 2),  # twice on a rank, and sent to it once
        ([[0, 1, 2, 0], [0, 1, 2, 0]], [[0, 1, 2, 1], [2, 1, 1, 0]], 3),
        ([[0, 1, 2, -1]], [[0, 1, 2, 0]], 1),
    ],
)
def test_moved_experts(before: list[list[int]], after: list[list[int]], moved: int) -> None:
    assert moved_experts(np.array(before), np.array(after), RANKS, EXPERTS) == moved


def test_stats_say_what_changed_once() -> None:
    stats = BalanceStats()
    assert stats.take() == {}
    stats.count("rebalances", 1)
    stats.count("rebalances", 2)
    stats.set("moe_lb", 1.25)
    assert stats.take() == {"counters": {"rebalances": 3}, "gauges": {"moe_lb": 1.25}, "histograms": {}}
    assert stats.take() == {}
    stats.set("stalled", 1.0)
    assert stats.take()["gauges"] == {"moe_lb": 1.25, "stalled": 1.0}


def test_the_watchdog_warns_once_until_it_goes_on(said: list[tuple[str, str]]) -> None:
    dog = Watchdog(interval=3)
    assert [dog.step(busy, thread_is_dead=False) for busy in (True, True, True, False, True, True, True)] == [False] * 7
    assert [dog.step(True, thread_is_dead=False) for _ in range(3)] == [True, False, False] and dog.stalled
    assert dog.step(False, thread_is_dead=False) and not dog.stalled
    assert dog.step(False, thread_is_dead=True) and dog.stalled
    assert [level for level, _ in said] == ["WARNING", "INFO", "WARNING"]
    assert "has not ended in 3 steps" in said[0][1] and "its thread is dead" in said[2][1]


def test_a_recording_doubles_until_its_limit(tmp_path: Path) -> None:
    path, written = tmp_path / "loads.npz", []
    recorder = Recorder(path, 50, {"ranks": 2})
    steps = loads(2, 64).numpy()
    for start in range(0, 64, 8):
        recorder.add(steps[start : start + 8])
        recorder.wait()
        written.append(len(trace.read(path).counts))
    assert written == [8, 16, 16, 32, 32, 32, 50, 50]
    stored = trace.read(path)
    assert np.array_equal(stored.counts, steps[:50]) and stored.meta == {"ranks": 2}


def test_a_disk_that_fails_stops_nothing(tmp_path: Path, said: list[tuple[str, str]]) -> None:
    recorder = Recorder(tmp_path / "nowhere" / "loads.npz", 50, {})
    recorder.add(loads(2, 8).numpy())
    recorder.wait()
    assert "could not be written to" in said[-1][1]


@pytest.mark.parametrize(("layers", "experts", "limit"), [(4, 8, MAX_STEPS), (40, 384, 4369), (61, 4096, 268)])
def test_a_recording_is_bounded(layers: int, experts: int, limit: int) -> None:
    assert step_limit(layers, experts) == min(limit, MAX_STEPS)
    assert step_limit(layers, experts) * layers * experts * 4 <= MAX_BYTES


def test_a_last_table_for_the_page(root: Path) -> None:
    table = subprocess.run(
        [sys.executable, "-m", "deepinfer_vllm.eplb.metrics"], check=True, capture_output=True, text=True, cwd=root
    )
    assert table.stdout.startswith("| `vllm:deepinfer_eplb_` | Kind | Says |")
