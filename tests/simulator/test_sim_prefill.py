"""The lock-step prefill model against hand-computed steps and queueing theory, and the router's policy in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from deepinfer_costmodel.cost import Cost
from deepinfer_router.pick import Pick
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_router.target import Target
from deepinfer_router.work import Work
from deepinfer_simulator.arrivals import shuffled
from deepinfer_simulator.baselines import Least, RandomChoice, RoundRobin, pending_seconds
from deepinfer_simulator.chunks import BudgetChunks, FixedChunks, WholePrompts
from deepinfer_simulator.events import EventQueue
from deepinfer_simulator.prefill_model import COST, PrefillModel, PrefillRun
from deepinfer_simulator.prefill_policies import routers_own
from deepinfer_simulator.prefill_stats import PrefillStats, statistics
from deepinfer_simulator.traces import TraceRequest, read, scaled, with_hits

FLAT = Cost(alpha=0.0, beta=0.001, gamma=0.0)
"""A thousand tokens a second."""


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    root = Path(__file__).resolve().parents[2]
    return scaled(with_hits(read(root / "benchmarks" / "traces" / "mooncake_conversation_trace.jsonl.gz")), 2.5)


def at(run: PrefillRun) -> list[tuple[float, float]]:
    """(arrival, seconds to first token), as they arrived."""
    return sorted((served.request.at, served.seconds) for served in run.served)


class Listed:
    """Ranks in the order they are given."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = iter(ranks)

    def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
        return Pick(targets[next(self._ranks)], "listed")


def test_events_come_in_order() -> None:
    events, seen = EventQueue(), list[tuple[float, str]]()

    def see(name: str) -> None:
        seen.append((events.now, name))

    events.at(2.0, lambda: see("b"))
    events.at(1.0, lambda: (see("a"), events.at(2.0, lambda: see("c"))))  # type: ignore[func-returns-value]
    events.at(2.0, lambda: see("d"))
    events.run()
    assert seen == [(1.0, "a"), (2.0, "b"), (2.0, "d"), (2.0, "c")]
    with pytest.raises(ValueError, match="event at 1.5 s, after 2.0 s"):
        events.at(1.5, events.run)


def test_two_ranks_by_hand() -> None:
    """Rank 0 has 1000 and 500 tokens, rank 1 2500, in chunks of 1000: steps of 1, 1 and 0.5 s.

    What comes at 0.1 waits for the step that runs; rank 0's chunk of 500 takes as long as rank 1's of 1000.
    """
    trace = [TraceRequest(0.0, 1000, 1), TraceRequest(0.1, 500, 1), TraceRequest(0.1, 2500, 1)]
    run = PrefillModel(1, 2, FixedChunks(1000), FLAT).run(trace, Listed([0, 0, 1]), Random(0))
    assert at(run) == [(0.0, pytest.approx(1.0)), (0.1, pytest.approx(1.9)), (0.1, pytest.approx(3.4))]
    assert run.computed_s == pytest.approx(4.0) and run.stepped_s == pytest.approx(2 * (1.0 + 1.0 + 1.0 + 0.5))


def test_prompts_share_a_chunk() -> None:
    """400 + 600 tokens of 1000 in the first step, which begins with the first arrival alone."""
    trace = [TraceRequest(0.0, 300, 1), TraceRequest(0.1, 400, 1), TraceRequest(0.1, 900, 1)]
    run = PrefillModel(1, 1, FixedChunks(1000), FLAT).run(trace, Listed([0, 0, 0]), Random(0))
    assert at(run) == [(0.0, pytest.approx(0.3)), (0.1, pytest.approx(1.2)), (0.1, pytest.approx(1.5))]


def test_a_budget_takes_fewer_tokens_behind_more() -> None:
    """beta 1 ms, gamma 1 us: 100 ms are 95 tokens behind none and 49 behind 1000; hits are not computed."""
    cost = Cost(alpha=0.0, beta=1e-3, gamma=1e-6)
    for cached, first in ((0, 95), (1000, 49)):
        trace = [TraceRequest(0.0, cached + first + 1, 1, hit_tokens=cached)]
        run = PrefillModel(1, 1, BudgetChunks(0.1), cost).run(trace, RoundRobin(), Random(0))
        whole = cost.seconds(first + 1, cached)
        assert run.served[0].seconds == pytest.approx(whole) and cost.seconds(first, cached) <= 0.1
        assert cost.seconds(first + 1, cached) > 0.1


def test_a_budget_below_a_token_still_moves() -> None:
    run = PrefillModel(1, 1, BudgetChunks(1e-9), FLAT).run([TraceRequest(0.0, 3, 1)] * 2, RoundRobin(), Random(0))
    assert sorted(served.seconds for served in run.served) == pytest.approx([0.003, 0.006])


@pytest.mark.parametrize(("load", "seed"), [(0.5, 1), (0.7, 2)])
def test_one_engine_is_a_queue_of_m_d_1(load: float, seed: int) -> None:
    """Poisson arrivals, equal service, one server: the mean wait is load / (2 (1 - load)) services
    (Pollaczek-Khinchine)."""
    trace = [TraceRequest(0.0, 1000, 1)]
    arrivals = list(shuffled(trace, load, 30_000.0, Random(seed)))
    run = PrefillModel(1, 1, WholePrompts(), FLAT).run(arrivals, RoundRobin(), Random(0))
    wait = fmean(served.seconds for served in run.served) - 1.0
    assert wait == pytest.approx(load / (2 * (1 - load)), rel=0.1)
    assert run.computed_s == pytest.approx(len(arrivals))


@pytest.mark.parametrize("chunking", [FixedChunks(), BudgetChunks(), WholePrompts()])
def test_every_prompt_is_served_once_with_all_its_work(trace: list[TraceRequest], chunking: object) -> None:
    arrivals = list(shuffled(trace, 20.0, 60.0, Random(4)))
    model = PrefillModel(8, 4, chunking)  # type: ignore[arg-type]
    own = routers_own(PrefillConfig(first_cut_requests=16, epoch_s=5.0), COST)
    run = model.run(arrivals, own.policy, Random(4), own.arrive)
    assert Counter(served.request for served in run.served) == Counter(arrivals)
    least = sum(COST.seconds(r.input_tokens - r.hit_tokens, r.hit_tokens) - COST.alpha for r in arrivals)
    assert least <= run.computed_s <= run.stepped_s * (1 + 1e-9)
    for served in run.served:
        need = COST.seconds(served.request.input_tokens - served.request.hit_tokens, served.request.hit_tokens)
        assert served.seconds >= need * (1 - 1e-9)
    for target in model.targets:
        assert (target.active, target.pending_seconds, target.kv_tokens, target.prefills) == (0, 0.0, 0, {})


def test_a_policy_that_places_nothing_is_an_error() -> None:
    class Nothing:
        def pick(self, work: Work, targets: Sequence[Target], now: float, rng: Random) -> Pick | None:
            return None

    with pytest.raises(ValueError, match="Nothing has no target for 7 tokens at 1.000 s"):
        PrefillModel(1, 1, FixedChunks()).run([TraceRequest(1.0, 7, 1)], Nothing(), Random(0))


def run_of(
    trace: list[TraceRequest], load: float, chunking: object, config: PrefillConfig, seed: int = 1
) -> PrefillStats:
    mean = fmean(COST.seconds(r.input_tokens - r.hit_tokens, r.hit_tokens) for r in trace)
    own = routers_own(config, COST)
    arrivals = shuffled(trace, load * 64 / mean, 400.0, Random(seed))
    run = PrefillModel(16, 4, chunking).run(arrivals, own.policy, Random(seed), own.arrive)  # type: ignore[arg-type]
    return statistics(run, 400.0, own.moves())


def test_fixed_chunks_keep_short_prompts_short_where_a_mixed_pool_drowns(trace: list[TraceRequest]) -> None:
    mixed = run_of(trace, 0.65, FixedChunks(), PrefillConfig(pools=False))
    pools = run_of(trace, 0.65, FixedChunks(), PrefillConfig())
    assert mixed.drift > 2 and mixed.mean_s > 8
    assert pools.mean_s < 2.6 and pools.groups[0].p99_s < 0.55 and pools.efficiency > 1.1 * mixed.efficiency
    assert pools.moves_per_minute <= 2


def test_budget_chunks_leave_little_to_gain(trace: list[TraceRequest]) -> None:
    mixed = run_of(trace, 0.75, BudgetChunks(), PrefillConfig(pools=False))
    pools = run_of(trace, 0.75, BudgetChunks(), PrefillConfig())
    assert pools.mean_s == pytest.approx(mixed.mean_s, rel=0.1)
    assert pools.groups[0].p99_s == pytest.approx(mixed.groups[0].p99_s, rel=0.15)


def test_least_work_left_is_what_pools_off_gives(trace: list[TraceRequest]) -> None:
    """Independent engines: the same as a plain rule that takes the least predicted seconds, and far better than
    chance."""
    arrivals = list(shuffled(trace, 25.0, 60.0, Random(2)))

    def mean(policy: object) -> float:
        run = PrefillModel(32, 1, WholePrompts()).run(arrivals, policy, Random(2))  # type: ignore[arg-type]
        return fmean(served.seconds for served in run.served)

    own = routers_own(PrefillConfig(pools=False), COST)
    assert mean(own.policy) == pytest.approx(mean(Least(pending_seconds)), rel=0.25)
    assert mean(own.policy) < 0.5 * mean(RandomChoice())


def test_the_same_seed_gives_the_same_run(trace: list[TraceRequest]) -> None:
    def times(seed: int) -> list[tuple[float, float]]:
        own = routers_own(PrefillConfig(), COST)
        arrivals = shuffled(trace, 40.0, 20.0, Random(seed))
        return at(PrefillModel(16, 4, FixedChunks()).run(arrivals, own.policy, Random(seed), own.arrive))

    assert times(3) == times(3) != times(4)
