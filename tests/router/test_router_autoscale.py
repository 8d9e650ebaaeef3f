"""How many engines there should be."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_router.autoscale import Autoscale
from deepinfer_router.autoscale_config import AutoscaleConfig
from deepinfer_router.autoscale_stage import Recommendation, StageScale
from deepinfer_router.engine_costs import EngineCosts
from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.fleet import Fleet
from deepinfer_router.fleet_view import Row, engines_of, merged_engines
from deepinfer_router.metrics import Registry
from deepinfer_router.prefill import PrefillPolicy
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_router.roles import Role
from deepinfer_router.work import Work


class Followed:
    """A fleet that does what is recommended, `late_s` later when engines have to start."""

    def __init__(self, engines: int, late_s: float = 300.0, **config: Any) -> None:
        self.scale = StageScale(AutoscaleConfig(**config).limits())
        self.engines = engines
        self.late_s = late_s
        self.starting: list[float] = []
        self.now = 0.0

    def minute(self, used: float, ill: int = 0) -> Recommendation:
        self.now += 60.0
        while self.starting and self.starting[0] <= self.now:
            self.starting.pop(0)
            self.engines += 1
        said = self.scale.update(self.engines, ill, used, self.now)
        if said.desired < self.engines:
            self.engines = said.desired
        for _ in range(said.desired - self.engines - len(self.starting)):
            self.starting.append(self.now + self.late_s)
        return said


def test_up_at_once_with_a_spare() -> None:
    said = Followed(4).minute(used=7.0)
    assert (said.desired, said.reason, said.blocked) == (11, "demand", "")  # 7.0 / 0.7, and one more
    assert said.utilisation == 7.0 / 4


def test_down_one_step_at_a_time() -> None:
    fleet = Followed(10)
    said = [fleet.minute(used=1.4) for _ in range(60)]
    assert [each.desired for each in said[:6]] == [10, 10, 10, 10, 10, 9]
    assert said[5].blocked == "one step at a time"
    steps = [a.desired - b.desired for a, b in zip(said, said[1:], strict=False)]
    assert max(steps) == 1
    assert said[-1].desired == 3  # 1.4 / 0.7, and one more
    assert said[-1].blocked == ""
    lowered = [i for i, step in enumerate(steps) if step]
    assert min(b - a for a, b in zip(lowered, lowered[1:], strict=False)) >= 5


@pytest.mark.parametrize(
    ("used", "ill", "config", "why"),
    [
        (9.9, 0, {"target_utilisation": 1.0, "quota_utilisation": 0.8}, "quota utilisation"),
        (2.0, 1, {}, "engines are ill"),
    ],
)
def test_down_is_refused(used: float, ill: int, config: dict[str, float], why: str) -> None:
    fleet = Followed(12, **config)
    for _ in range(20):
        said = fleet.minute(used, ill)
    assert (said.desired, said.blocked) == (12, why)


def test_a_need_of_a_little_while_ago_is_remembered() -> None:
    fleet = Followed(10)
    for minute in range(30):
        said = fleet.minute(used=6.0 if minute % 4 == 0 else 1.0)
        assert 10 <= said.desired <= 12  # 6.0 / 0.7, and one more; of such a spike little is taken for growth


def test_growth_is_taken_as_far_ahead_as_engines_take_to_start() -> None:
    demand = [3.0 + 0.2 * minute for minute in range(60)]
    seeing, blind = Followed(6), Followed(6, startup_s=0.0)
    with_growth = [seeing.minute(used).utilisation for used in demand]
    without = [blind.minute(used).utilisation for used in demand]
    assert max(with_growth[10:]) < 0.7 < max(without[10:])


def test_engines_that_somebody_added_are_not_all_sent_away() -> None:
    fleet = Followed(4)
    for _ in range(10):
        fleet.minute(used=2.0)
    fleet.engines = 9
    assert fleet.minute(used=2.0).desired == 9


def test_bounds_hold() -> None:
    assert Followed(4, max_engines=6).minute(used=100.0).desired == 6
    fleet = Followed(3, min_engines=2)
    for _ in range(60):
        said = fleet.minute(used=0.0)
    assert said.desired == 2


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 2)), min_size=1, max_size=80))
def test_never_down_while_much_is_in_use_or_something_is_ill(history: list[tuple[float, int]]) -> None:
    fleet = Followed(8)
    before = fleet.scale.update(8, 0, 0.0, 0.0).desired
    for used, ill in history:
        engines = fleet.engines
        said = fleet.minute(used, ill)
        if said.desired < before:
            assert said.desired == before - 1
            assert not ill
            assert used <= 0.8 * max(engines, fleet.engines, said.engines) + 1e-9
        before = said.desired


def fleet_of(prefill: int, decode: int, both: int = 0) -> Fleet:
    fleet = Fleet()
    for name, count, roles in (
        ("p", prefill, frozenset((Role.PREFILL,))),
        ("d", decode, frozenset((Role.DECODE,))),
        ("b", both, frozenset((Role.PREFILL, Role.DECODE))),
    ):
        for i in range(count):
            fleet.add(EngineSpec(f"http://{name}{i}:1", roles=roles, ranks=2))
    return fleet


def rows(fleet: Fleet) -> list[Row]:
    return merged_engines([engines_of(fleet)])


def status(policy: PrefillPolicy) -> Row:
    return {"arrived_seconds": policy.arrived_seconds, "arrived_tokens": policy.arrived_tokens}


def test_stages_follow_what_arrives_and_what_is_active() -> None:
    fleet = fleet_of(prefill=4, decode=2)
    policy = PrefillPolicy(PrefillConfig(), EngineCosts())
    registry = Registry()
    scale = Autoscale(AutoscaleConfig(spare_fraction=0.0).limits(), registry)
    for second in range(300):
        for _ in range(2):
            policy.arrive(Work(prompt_tokens=65_000, hit_tokens=1000), fleet.targets(Role.PREFILL), float(second))
        scale.update(rows(fleet), [status(policy)], float(second))
    for target in fleet.targets(Role.DECODE):
        fleet.book(target, Work(prompt_tokens=10), Role.DECODE)
    cost = EngineCosts().of("").seconds(64_000, 1000)
    said = scale.update(rows(fleet), [status(policy), {"waiting": 1020}], 300.0)
    assert said["uncached_tokens_per_s"] == pytest.approx(128_000, rel=0.05)
    assert said["prefill"]["utilisation"] == pytest.approx(2 * cost / 8, rel=0.05)
    assert said["prefill"]["need"] == pytest.approx(2 * cost / 0.7 / 2, rel=0.05)
    assert said["active_requests"] >= 1020
    assert said["decode"]["need"] == pytest.approx(said["active_requests"] / 64 / 0.7 / 2)
    shown = {
        (family["name"].removeprefix("deepinfer_router_autoscale_"), *labels): value
        for family in registry.snapshot()
        for labels, value in family["children"]
    }
    assert shown["desired_engines", "prefill"] == said["prefill"]["desired"]
    assert shown["uncached_tokens_per_second",] == said["uncached_tokens_per_s"]


def test_a_worker_that_starts_again_is_no_negative_demand() -> None:
    fleet = fleet_of(0, 0, both=2)
    scale = Autoscale(AutoscaleConfig().limits(), Registry())
    for second, total in enumerate([0.0, 10.0, 20.0, 0.0, 10.0]):
        said = scale.update(rows(fleet), [{"arrived_seconds": total}], 30.0 * second)
        assert said["prefill_seconds_per_s"] >= 0
    assert said["prefill"]["engines"] == said["decode"]["engines"] == 2


def test_what_waits_is_demand_and_an_empty_fleet_is_no_error() -> None:
    scale = Autoscale(AutoscaleConfig(backlog_s=60.0).limits(), Registry())
    assert scale.update([], [], 0.0) == {}
    said = scale.update(rows(fleet_of(1, 0)), [{"waiting_seconds": 600.0}], 1.0)
    assert said["prefill"]["need"] == pytest.approx(600 / 60 / 0.7 / 2)
