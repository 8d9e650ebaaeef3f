"""The fitted weight of a KV token."""

from random import Random

import pytest

from deepinfer_router.decode import DecodePolicy
from deepinfer_router.decode_fit import WeightFit
from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work


def fitted(true_weight: float, noise: float = 0.05, samples: int = 3000, spread: float = 0.5) -> WeightFit:
    rng, fit = Random(3), WeightFit(DecodePolicy(), 3.4e-4)
    for _ in range(samples):
        active = round(60 * rng.uniform(1 - spread, 1 + spread))
        kv_tokens = round(700_000 * rng.uniform(1 - spread, 1 + spread))
        seconds = 0.0106 + 1.05e-4 * (active + true_weight * kv_tokens)
        fit.observe(active, kv_tokens, seconds * rng.uniform(1 - noise, 1 + noise))
    return fit


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_the_true_weight_is_found(factor: float) -> None:
    assert fitted(3.4e-4 * factor).kv_weight == pytest.approx(3.4e-4 * factor, rel=0.5)


def test_it_stays_within_four_times_the_configured() -> None:
    assert fitted(1.0).kv_weight == pytest.approx(4 * 3.4e-4)
    assert fitted(0.0).kv_weight == pytest.approx(3.4e-4 / 4)


def test_noise_changes_nothing() -> None:
    rng, fit = Random(1), WeightFit(DecodePolicy(), 3.4e-4)
    for _ in range(5000):
        fit.observe(rng.randrange(200), rng.randrange(10**6), rng.uniform(0.01, 0.1))
    fit.observe(0, 0, 1.0)
    fit.observe(5, 5, float("nan"))
    fit.observe(5, 5, -1.0)
    assert fit.kv_weight == 3.4e-4


def test_the_policy_follows() -> None:
    policy = DecodePolicy()
    fit = WeightFit(policy, 3.4e-4)
    few_long = Target(Engine("a", ""), active=10, kv_tokens=100_000)
    many_short = Target(Engine("b", ""), active=100, kv_tokens=0)
    targets = [few_long, many_short]

    def chosen() -> Target | None:
        pick = policy.pick(Work(), targets, 1.0, Random(0))
        return pick and pick.target

    assert chosen() is few_long
    rng = Random(3)
    for _ in range(1000):
        active, kv_tokens = rng.randrange(1, 100), rng.randrange(10**6)
        fit.observe(active, kv_tokens, 0.01 + 1e-4 * (active + 1.36e-3 * kv_tokens))
    assert fit.kv_weight == pytest.approx(1.36e-3)
    assert chosen() is many_short
