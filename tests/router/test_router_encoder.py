"""Encoders by outstanding pixels."""

from random import Random

import pytest

from deepinfer_router.encoder import EncoderPolicy
from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work


def made(*pending_seconds: float) -> list[Target]:
    return [Target(Engine(str(n), ""), pending_seconds=seconds) for n, seconds in enumerate(pending_seconds)]


def test_the_least_pixels() -> None:
    targets = made(0.3, 0.1, 0.2)
    pick = EncoderPolicy().pick(Work(images=1, pixels=2_000_000), targets, 1.0, Random(0))
    assert pick is not None and pick.target is targets[1]
    assert pick.predicted_seconds == pytest.approx(0.1 + 0.105)


def test_unknown_sizes_count_as_a_megapixel() -> None:
    policy = EncoderPolicy()
    assert policy.seconds(Work(images=3)) == policy.seconds(Work(images=3, pixels=3_000_000))


def test_ties_are_drawn_and_failed_engines_left_out() -> None:
    targets, policy, rng = made(0.0, 0.0, 0.0), EncoderPolicy(), Random(1)
    picks = {pick and pick.target.engine.id for pick in (policy.pick(Work(), targets, 1.0, rng) for _ in range(99))}
    assert picks == {"0", "1", "2"}
    pick = policy.pick(Work(excluded=("0", "2")), targets, 1.0, rng)
    assert pick is not None and pick.target is targets[1]
    assert policy.pick(Work(excluded=("0", "1", "2")), targets, 1.0, rng) is None


def test_a_new_encoder_takes_its_share() -> None:
    targets = made(0.5, 0.0)
    targets[0].active, targets[1].active, targets[1].uncertain_until = 4, 2, 31.0
    policy = EncoderPolicy(slow_start_s=30.0)
    for now, chosen in ((1.0, 0), (17.0, 1), (31.0, 1)):
        pick = policy.pick(Work(images=1), targets, now, Random(0))
        assert pick is not None and pick.target is targets[chosen]
