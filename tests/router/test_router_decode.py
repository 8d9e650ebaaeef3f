"""The decode policy against its plain definition, and what stands beside the score."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_router.decode import DecodePolicy
from deepinfer_router.decode_config import DecodeConfig
from deepinfer_router.pick import Pick
from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work

LOADS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2_000_000)), min_size=1, max_size=70)


def made(loads: list[tuple[int, int]], capacity: int | None = None) -> list[Target]:
    return [
        Target(Engine(str(number), "http://e"), active=active, kv_tokens=kv_tokens, capacity_tokens=capacity)
        for number, (active, kv_tokens) in enumerate(loads)
    ]


def chosen(pick: Pick | None) -> Target:
    assert pick is not None
    return pick.target


@given(LOADS, st.sampled_from((1e-6, 1e-4, 3.4e-4, 1e-3, 0.1)), st.integers(0, 99))
def test_least_of_the_score(loads: list[tuple[int, int]], weight: float, seed: int) -> None:
    targets = made(loads)
    pick = DecodePolicy(DecodeConfig(kv_weight=weight)).pick(Work(), targets, 1.0, Random(seed))
    rounded = 1 / round(1 / weight)
    score = [target.active + rounded * target.kv_tokens for target in targets]
    assert score[targets.index(chosen(pick))] <= min(score) * (1 + 1e-12)
    assert pick is not None and pick.reason == "least"


def test_ties_are_drawn_evenly() -> None:
    targets = made([(1, 0), (0, 9), (0, 9), (0, 9)])
    policy, rng = DecodePolicy(), Random(7)
    counts = [0] * 4
    for _ in range(3000):
        counts[targets.index(chosen(policy.pick(Work(), targets, 1.0, rng)))] += 1
    assert counts[0] == 0 and min(counts[1:]) > 900


def test_none_without_targets() -> None:
    assert DecodePolicy().pick(Work(), [], 0.0, Random(0)) is None


def test_capacity_is_respected() -> None:
    """kv + prompt + expected output <= 0.9 * capacity, to the token."""
    policy, rng = DecodePolicy(), Random(0)
    least, more = made([(1, 500), (5, 400)], capacity=1000)
    fits, too_large = Work(prompt_tokens=300, expected_output=100), Work(prompt_tokens=401, expected_output=100)
    assert chosen(policy.pick(fits, [least, more], 1.0, rng)) is least
    assert chosen(policy.pick(Work(prompt_tokens=301, expected_output=100), [least, more], 1.0, rng)) is more
    assert policy.pick(too_large, [least, more], 1.0, rng) is None
    least.shared_tokens, least.held_tokens = 101, 500
    assert chosen(policy.pick(too_large, [least, more], 1.0, rng)) is least
    more.capacity_tokens = None
    least.shared_tokens = 0
    assert chosen(policy.pick(too_large, [least, more], 1.0, rng)) is more


def test_an_idle_engine_says_itself_what_is_too_large() -> None:
    targets = made([(0, 0)], capacity=100)
    assert chosen(DecodePolicy().pick(Work(prompt_tokens=1000), targets, 1.0, Random(0))) is targets[0]


def test_engines_that_failed_it_are_not_asked_again() -> None:
    """NVIDIA-NeMo/RL#3613: retries went to the same dead worker."""
    targets = made([(0, 0), (5, 0)])
    policy = DecodePolicy()
    assert chosen(policy.pick(Work(excluded=("0",)), targets, 1.0, Random(0))) is targets[1]
    assert policy.pick(Work(excluded=("0", "1")), targets, 1.0, Random(0)) is None


def test_a_recovered_engine_takes_a_growing_share() -> None:
    """GAIE#1497: an engine that looks idle gets everything."""
    targets = made([(60, 0), (60, 0), (0, 0)])
    new = targets[2]
    new.uncertain_until = 130.0
    policy, rng = DecodePolicy(slow_start_s=30.0), Random(0)
    for now, most in ((100.0, 1), (103.0, 6), (115.0, 30), (129.99, 60)):
        while chosen(policy.pick(Work(), targets, now, rng)) is new:
            new.active += 1
        assert new.active == most
    new.active = 0
    assert chosen(policy.pick(Work(), targets, 130.0, rng)) is new


def test_slow_start_steers_and_never_refuses() -> None:
    targets = made([(9, 0), (3, 0)])
    for target in targets:
        target.uncertain_until = 100.0
    assert chosen(DecodePolicy().pick(Work(), targets, 71.0, Random(0))) is targets[1]
    old = made([(4, 100)], capacity=100)
    assert chosen(DecodePolicy().pick(Work(prompt_tokens=9), [*old, targets[1]], 71.0, Random(0))) is targets[1]


def test_draws_of_replicas() -> None:
    """Different targets are drawn, all alike often, and the least of them is taken."""
    targets = made([(number, 0) for number in range(10)])
    policy, rng = DecodePolicy(DecodeConfig(replicas=8, choices=4)), Random(3)
    counts = [0] * 10
    for _ in range(5000):
        pick = policy.pick(Work(), targets, 1.0, rng)
        assert pick is not None and pick.reason == "sampled"
        counts[targets.index(pick.target)] += 1
    # Of C(10, 4) = 210 sets, C(9 - i, 3) have i as their least.
    for number, sets in enumerate((84, 56, 35, 20, 10, 4, 1)):
        assert abs(counts[number] - 5000 * sets / 210) < 150
    assert counts[7:] == [0, 0, 0]


@pytest.mark.parametrize(("prompt_tokens", "drawn"), [(0, 2), (1000, 2), (4000, 6), (16_000, 16), (1_000_000, 20)])
def test_larger_requests_are_compared_with_more(prompt_tokens: int, drawn: int) -> None:
    """A request of `s` times the mean with s**0.75 times as many, at most half: how often the least of 40 is among
    them."""
    targets = made([(1 + (number > 0), 1000 * (1 + (number > 0))) for number in range(40)])
    policy, rng, work = DecodePolicy(DecodeConfig(replicas=2)), Random(5), Work(prompt_tokens=prompt_tokens)
    work.expected_output = 0
    picks = [policy.pick(work, targets, 1.0, rng) for _ in range(4000)]
    found = sum(pick is not None and pick.target is targets[0] for pick in picks)
    assert abs(found - 4000 * drawn / 40) < 4 * (4000 * drawn / 40) ** 0.5


def test_beyond_the_full_scan() -> None:
    targets = made([(1, 0)] * 513)
    config = DecodeConfig()
    reasons = [
        pick.reason
        for some in (targets[:512], targets)
        if (pick := DecodePolicy(config).pick(Work(), some, 1.0, Random(0))) is not None
    ]
    assert reasons == ["least", "sampled"]


def test_workers_that_share_counts_draw_from_many() -> None:
    targets = made([(1, 0)] * 9)
    reasons = [
        pick.reason
        for workers, some in ((1, targets), (2, targets[:8]), (2, targets))
        if (pick := DecodePolicy(workers=workers).pick(Work(), some, 1.0, Random(0))) is not None
    ]
    assert reasons == ["least", "least", "sampled"]


def test_a_draw_without_room_falls_back_to_all() -> None:
    targets = made([(5, 1000)] * 40, capacity=1000)
    targets[17].kv_tokens = 0
    pick = DecodePolicy(DecodeConfig(replicas=2)).pick(Work(), targets, 1.0, Random(0))
    assert chosen(pick) is targets[17]
