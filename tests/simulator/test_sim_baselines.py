"""The rules of other routers, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work
from deepinfer_simulator.baselines import (
    Least,
    PowerOf,
    RandomChoice,
    RoundRobin,
    active_and_kv,
    pending_seconds,
    requests,
)
from deepinfer_simulator.baselines_prefix import (
    CacheAware,
    ContextLengthAware,
    LMetric,
    PrefixTree,
    TraceWork,
    context_length_score,
)
from deepinfer_simulator.policy import Policy
from deepinfer_simulator.prefill_policies import context_length_aware

EVERY: list[Policy] = [
    RandomChoice(),
    RoundRobin(),
    Least(requests),
    PowerOf(2, requests),
    CacheAware(),
    LMetric(),
    ContextLengthAware({}),
]


def targets(*active: int) -> list[Target]:
    return [Target(Engine(str(number), "http://e"), active=count) for number, count in enumerate(active)]


def picked(policy: Policy, among: Sequence[Target], work: Work | None = None, seed: int = 0) -> int:
    pick = policy.pick(work or Work(), among, 0.0, Random(seed))
    assert pick is not None
    return among.index(pick.target)


def text(letters: str) -> TraceWork:
    return TraceWork(prompt_tokens=len(letters), elements=letters)


@pytest.mark.parametrize("policy", EVERY)
def test_of_none_nothing_is_picked(policy: Policy) -> None:
    assert policy.pick(text("abc"), [], 0.0, Random(0)) is None


def test_round_robin_goes_on_where_it_was() -> None:
    policy, among = RoundRobin(), targets(9, 0, 0)
    assert [picked(policy, among) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_draws_among_equals() -> None:
    among = targets(1, 0, 0, 5)
    assert {picked(Least(requests), among, seed=seed) for seed in range(30)} == {1, 2}
    among[2].pending_seconds = -1.0
    assert picked(Least(pending_seconds), among) == 2
    among[1].kv_tokens = 4000
    assert picked(Least(active_and_kv(1e-3)), among) == 2


def test_the_better_of_two() -> None:
    """Of three with loads 0, 1 and 2, the least is drawn in two pairs of three and then taken; the most is never."""
    among = targets(0, 1, 2)
    found = [picked(PowerOf(2, requests), among, seed=seed) for seed in range(300)]
    assert found.count(2) == 0 and abs(found.count(0) - 200) < 30
    assert picked(PowerOf(9, requests), among) == 0


def test_prefixes_and_who_has_them() -> None:
    tree = PrefixTree()
    tree.insert("abcd", 0)
    tree.insert("abxy", 1)
    tree.insert("ab", 2)
    assert tree.longest("abcz") == (3, {0})
    assert tree.longest("ab") == (2, {0, 1, 2}) and tree.longest("q") == (0, set())
    assert tree.matches("abxz", 4) == [2, 3, 2, 0]


def test_cache_aware_follows_a_prefix_until_loads_differ() -> None:
    policy, among = CacheAware(), targets(0, 0)
    assert picked(policy, among, text("a" * 10)) == 0
    assert picked(policy, targets(60, 0), text("a" * 10)) == 0
    assert picked(policy, targets(65, 0), text("a" * 10)) == 1  # more than 64 apart, and more than 1.5 times
    assert picked(policy, targets(200, 135), text("a" * 10)) == 0  # 65 apart, but not 1.5 times
    assert picked(policy, targets(3, 2), text("aaa" + "b" * 7)) == 1  # 0.3 of it is not more than 0.3


def test_lmetric_weighs_what_is_new_by_requests() -> None:
    policy = LMetric()
    assert picked(policy, targets(0, 1), text("a" * 100)) == 0
    assert picked(policy, targets(4, 0), text("a" * 90 + "b" * 10)) == 0  # 10 * 5 against 100 * 1
    assert picked(policy, targets(10, 0), text("a" * 90 + "c" * 10)) == 1  # 10 * 11


def test_context_length_scores() -> None:
    """The published constants: 0.3 and more within a range, more for narrow ones; less than 0.3 outside."""
    assert context_length_score(0, 0, 10_000) == pytest.approx(0.3 + 0.7 * (0.7 / 2 + 0.3))
    assert context_length_score(9_999, 0, 10_000) < context_length_score(100, 0, 10_000)
    assert context_length_score(100, 0, 1_000) > context_length_score(100, 0, 100_000)
    assert context_length_score(12_000, 0, 10_000) == pytest.approx(0.1)
    assert context_length_score(500, 1_000, 2_000) == pytest.approx(0.3 / 1.5)


def test_labels_are_spread_evenly_and_followed() -> None:
    among = targets(0, 0, 0, 0)
    policy = context_length_aware(among, (1_000, 10_000, 100_000))
    lengths = (10, 5_000, 50_000, 5_000_000)
    assert [picked(policy, among, Work(prompt_tokens=length)) for length in lengths] == [0, 1, 2, 3]
    two = targets(3, 0)
    both = ContextLengthAware({"0": (0, 1_000), "1": (0, 1_000)})
    assert picked(both, two, Work(prompt_tokens=10)) == 1


def test_a_rule_that_follows_prefixes_needs_them() -> None:
    with pytest.raises(TypeError, match="Work has no elements"):
        CacheAware().pick(Work(), targets(0), 0.0, Random(0))
