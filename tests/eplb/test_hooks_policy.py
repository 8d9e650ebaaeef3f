"""Our policy where vLLM asks its own, and what stands around its state."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_vllm.eplb import vllm_policy
from deepinfer_vllm.eplb.balancer import LB_STEPS, Balancer
from deepinfer_vllm.eplb.policy import place
from deepinfer_vllm.eplb.stats import BalanceStats
from deepinfer_vllm.eplb.vllm_policy import StepPolicy, decide

RANKS, SLOTS, EXPERTS, LAYERS = 2, 6, 4, 2
START = torch.tensor([0, 1, 2, 3, 0, 1]).expand(LAYERS, SLOTS).contiguous()


class Alone:
    """An agreement of one rank, which sees twice its own loads."""

    def __init__(self, is_first: bool = True) -> None:
        self.is_first = is_first
        self.heard: torch.Tensor | None = None

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)

    def decided(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.heard is None else tensor.copy_(self.heard)

    def any(self, wanted: bool) -> bool:
        return wanted


def counts(seed: int, steps: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, (steps, LAYERS, EXPERTS)).astype(np.int32)


def ask(policy: Any, weight: torch.Tensor, old: torch.Tensor | None = START) -> torch.Tensor:
    """As vLLM does."""
    placed: torch.Tensor = policy.rebalance_experts(weight, SLOTS, 1, 1, RANKS, old)
    return placed


def step_policy(known: Any, agreement: Any = None, max_moves: int | None = None) -> tuple[StepPolicy, BalanceStats]:
    stats = BalanceStats()
    return StepPolicy(lambda: known, max_moves, agreement or Alone(), stats), stats


def test_steps_decide_where_they_are_known() -> None:
    known = counts(1, 5)
    policy, _ = step_policy(known)
    weight = torch.from_numpy(known.sum(0))
    want = place(known, RANKS, SLOTS, current=START.numpy().astype(np.int32))
    placed = ask(policy, weight)
    assert placed.dtype == torch.int64 and placed.tolist() == want.tolist()
    assert {frozenset(layer) for layer in placed.tolist()} == {frozenset(range(EXPERTS))}


@pytest.mark.parametrize("known", [None, counts(1, 5)[..., :3], np.zeros((5, LAYERS, EXPERTS), np.int32)])
def test_else_sums_do(known: Any) -> None:
    policy, _ = step_policy(known)
    weight = torch.from_numpy(counts(2, 1)[0])
    want = place(weight.unsqueeze(0).numpy(), RANKS, SLOTS, current=START.numpy().astype(np.int32))
    assert ask(policy, weight).tolist() == want.tolist()


def test_sums_are_mentioned_once(said: list[tuple[str, str]]) -> None:
    policy, _ = step_policy(None)
    ask(policy, torch.zeros(LAYERS, EXPERTS, dtype=torch.int64))  # vLLM's profiling
    assert not said
    for _ in range(3):
        ask(policy, torch.from_numpy(counts(2, 1)[0]))
    assert [message for _, message in said] == [
        "EPLB places experts by sums over its window: loads by step are not known here."
    ]


def test_without_load_nothing_moves() -> None:
    policy, _ = step_policy(np.zeros((5, LAYERS, EXPERTS), np.int32))
    assert ask(policy, torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)).tolist() == START.tolist()


def test_the_others_do_as_the_first() -> None:
    """A rank that sees other numbers, or would decide otherwise, takes what it hears."""
    agreement = Alone(is_first=False)
    agreement.heard = START.flip(1)
    policy, _ = step_policy(counts(3, 5), agreement)
    assert ask(policy, torch.from_numpy(counts(3, 1)[0])).tolist() == START.flip(1).tolist()


def test_moves_are_bounded() -> None:
    policy, _ = step_policy(counts(4, 5), max_moves=1)
    assert int((ask(policy, torch.ones(LAYERS, EXPERTS, dtype=torch.int64)) != START).sum()) <= 1


@pytest.mark.parametrize("wrong", ["raises", "leaves an expert out"])
def test_a_policy_that_fails_moves_nothing(
    monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, str]], wrong: str
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        if wrong == "raises":
            raise RuntimeError("no placement")
        return np.zeros((LAYERS, SLOTS), np.int32)

    monkeypatch.setattr(vllm_policy, "place", failing)
    policy, stats = step_policy(counts(5, 5))
    assert ask(policy, torch.ones(LAYERS, EXPERTS, dtype=torch.int64)).tolist() == START.tolist()
    assert stats.take()["counters"] == {"failed_decisions": 1} and "stay where they are" in said[-1][1]


def test_an_engine_that_grows_has_no_current_placement() -> None:
    weight = torch.from_numpy(counts(6, 1)[0])
    old = torch.nn.functional.pad(START[:, :3], (0, 3), value=-1)
    placed = [decide(None, weight, SLOTS, 1, RANKS, current, None).tolist() for current in (old, None)]
    assert placed[0] == placed[1]


class State:
    """vLLM's EPLB state as a balancer uses it: one model, and a switch for a rebalancing under way."""

    def __init__(self, window: int, interval: int) -> None:
        slots = SLOTS // RANKS
        model = SimpleNamespace(
            num_logical_experts=EXPERTS,
            num_local_physical_experts=slots,
            num_moe_layers=LAYERS,
            expert_weights=[[torch.zeros(slots, 3), torch.zeros(slots, 5).half()]] * LAYERS,
        )
        self.model_state = SimpleNamespace(
            model=model,
            model_name="a model",
            expert_load_pass=torch.zeros(LAYERS, SLOTS, dtype=torch.int32),
            physical_to_logical_map=START.clone(),
            rebalanced=False,
        )
        self.model_states = {"model": self.model_state}
        self.parallel_config = SimpleNamespace(eplb_config=SimpleNamespace(window_size=window, step_interval=interval))
        self.policy: Any = None
        self.async_worker: Any = None


Make = Callable[..., tuple[State, Balancer]]


@pytest.fixture
def balanced() -> Make:
    def make(window: int = 4, interval: int = 1000, **kwargs: Any) -> tuple[State, Balancer]:
        state: Any = State(window, interval)
        agreement: Any = Alone()
        balancer = Balancer(state, agreement, **{"places": True, "record_to": "", "max_bytes": 0, **kwargs})
        balancer.add_model()
        return state, balancer

    return make


def step(state: State, balancer: Balancer, load: torch.Tensor, is_dummy: bool = False) -> None:
    state.model_state.expert_load_pass.copy_(load)
    balancer.before_step(is_dummy)
    state.model_state.expert_load_pass.zero_()
    balancer.after_step()


def test_moe_lb_is_of_128_steps_of_all_ranks(balanced: Make) -> None:
    state, balancer = balanced()
    generator = torch.Generator().manual_seed(1)
    slowest = mean = 0.0
    for number in range(LB_STEPS):
        assert balancer.stats.take() == {}
        load = torch.randint(0, 9, (LAYERS, SLOTS), generator=generator)
        dummy = number % 3 == 1
        if not dummy:
            ranks = 2 * load.view(LAYERS, RANKS, -1).sum(-1)
            slowest, mean = slowest + int(ranks.amax(-1).sum()), mean + float(ranks.double().mean(-1).sum())
        step(state, balancer, load, dummy)
    report = balancer.stats.take()
    assert report["counters"] == {"slowest_rank_tokens": slowest, "mean_rank_tokens": mean}
    assert report["gauges"] == {"moe_lb": slowest / mean, "steps_since_rebalance": 128.0}


def test_a_window_without_tokens_says_nothing_of_balance(balanced: Make) -> None:
    state, balancer = balanced()
    for _ in range(LB_STEPS):
        step(state, balancer, torch.ones(LAYERS, SLOTS), is_dummy=True)
    assert "moe_lb" not in balancer.stats.take()["gauges"]


def test_the_policy_gets_the_windows_steps_of_all_ranks(balanced: Make) -> None:
    state, balancer = balanced(window=3)
    loads = torch.randint(0, 9, (5, LAYERS, SLOTS), generator=torch.Generator().manual_seed(2))
    for load in loads:
        step(state, balancer, load)
    balancer.before_rearrange(known=True)
    want = np.zeros((3, LAYERS, EXPERTS), int)
    for number, load in enumerate(loads[2:].numpy()):
        for slot, expert in enumerate(START[0].tolist()):
            want[number, :, expert] += 2 * load[:, slot]
    assert state.policy._next_counts().tolist() == want.tolist()
    assert state.policy._next_counts() is None
    balancer.before_rearrange(known=False)
    assert state.policy._next_counts() is None


def test_what_a_rebalancing_did(balanced: Make) -> None:
    """Asynchronous: layer by layer, while steps go on."""
    state, balancer = balanced()
    load = torch.ones(LAYERS, SLOTS)
    step(state, balancer, load)
    balancer.before_rearrange(known=True)
    state.model_state.rebalanced = True
    step(state, balancer, load)
    state.model_state.physical_to_logical_map[0] = torch.tensor([3, 1, 2, 3, 0, 1])
    step(state, balancer, load)
    assert balancer.stats.take() == {}
    state.model_state.rebalanced = False
    step(state, balancer, load)
    counters = balancer.stats.take()["counters"]
    assert counters.pop("rebalance_seconds") >= 0
    assert counters == {"rebalances": 1, "moved_experts": 1, "moved_bytes": 3 * 4 + 5 * 2}


def test_bytes_bound_moves(balanced: Make, said: list[tuple[str, str]]) -> None:
    assert balanced(max_bytes=0)[0].policy._max_moves is None
    assert balanced(max_bytes=45)[0].policy._max_moves == 2
    assert not said
    assert balanced(max_bytes=21)[0].policy._max_moves == 0
    assert "MAX_MIGRATION=21 is less than an expert's 22 bytes" in said[-1][1]
    assert balanced(places=False)[0].policy is None


def test_a_stall_is_reported(balanced: Make) -> None:
    state, balancer = balanced(interval=3)
    state.model_state.rebalanced = True
    for _ in range(4):
        step(state, balancer, torch.zeros(LAYERS, SLOTS))
    assert balancer.stats.take()["gauges"] == {"stalled": 1.0}
    state.model_state.rebalanced = False
    step(state, balancer, torch.zeros(LAYERS, SLOTS))
    assert balancer.stats.take()["gauges"] == {"stalled": 0.0}
    state.async_worker = SimpleNamespace(is_alive=lambda: False)
    step(state, balancer, torch.zeros(LAYERS, SLOTS))
    assert balancer.stats.take()["gauges"] == {"stalled": 1.0}


def test_a_recording_has_every_step(balanced: Make, tmp_path: Any) -> None:
    from deepinfer_vllm.eplb import trace

    path = tmp_path / "loads.npz"
    state, balancer = balanced(record_to=str(path))
    for number in range(2 * LB_STEPS):
        load = torch.zeros(LAYERS, SLOTS)
        load[:, 2] = number
        step(state, balancer, load, is_dummy=number == 5)
    assert balancer._recorder is not None
    balancer._recorder.wait()
    stored = trace.read(path)
    numbers = [2 * number if number != 5 else 0 for number in range(2 * LB_STEPS)]
    assert stored.counts[:, 1, 2].tolist() == numbers and not stored.counts[..., [0, 1, 3]].any()
    assert stored.meta == {"model": "a model", "ranks": 2, "physical": 6, "window_size": 4, "step_interval": 1000}
