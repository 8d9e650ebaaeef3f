"""Which engines serve which lengths, as demand changes."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_router.engine_state import EngineState
from deepinfer_router.pools import Pools
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work

LENGTHS = [1_000, 20_000, 100_000, 300_000]
EPOCH_S = 20.0


def engines(count: int) -> list[Engine]:
    made = [Engine(f"{i:02}", f"http://10.0.0.{i}:8000") for i in range(count)]
    for engine in made:
        engine.targets = [Target(engine, rank) for rank in range(2)]
    return made


class Driven:
    """Pools under a steady or changing load, epoch by epoch."""

    def __init__(self, count: int, **settings: object) -> None:
        self.engines = engines(count)
        self.pools = Pools(PrefillConfig(**{"first_cut_requests": 1} | settings))  # type: ignore[arg-type]
        self.now = 0.0
        self.know()

    def know(self) -> None:
        for engine in self.engines:
            self.pools.know(engine)

    def epoch(self, *demand: float) -> bool:
        """So many seconds of work a second arrive in each group."""
        for length, rate in zip(LENGTHS, demand, strict=True):
            if rate:
                self.pools.observe(Work(prompt_tokens=length), rate * EPOCH_S, self.now)
        self.now += EPOCH_S
        return self.pools.update(self.now)

    def serving(self) -> list[int]:
        return [len(self.pools.engines_of(g)) for g in range(4)]


def test_first_cut_follows_demand_at_once() -> None:
    driven = Driven(16)
    assert driven.serving() == [16] * 4
    assert driven.epoch(2, 4, 8, 2)
    assert driven.serving() == [2, 4, 8, 2]
    assert driven.pools.moves == 0


def test_demand_is_smoothed_and_moves_are_few() -> None:
    driven = Driven(16)
    driven.epoch(4, 4, 4, 4)
    moved = []
    for _ in range(12):
        driven.epoch(8, 4, 2, 2)
        moved.append(driven.pools.moves)
    assert max(b - a for a, b in zip([0, *moved], moved, strict=False)) <= 2
    assert driven.serving() == [8, 4, 2, 2]
    assert moved[-1] == 4  # not one too many


def test_a_steady_noisy_load_moves_nearly_nothing() -> None:
    rng = Random(5)
    driven = Driven(16)
    for _ in range(180):  # an hour
        driven.epoch(*(mean * rng.uniform(0.7, 1.3) for mean in (1.5, 4.0, 7.0, 2.5)))
    assert driven.pools.moves <= 60  # one a minute, where two are allowed


def test_a_load_that_swings_does_not_flap() -> None:
    driven = Driven(16)
    swings = 0
    for epoch in range(180):
        swings += epoch % 15 == 0
        driven.epoch(*((3, 3, 3, 3) if epoch // 15 % 2 else (1.5, 1.5, 3, 6)))
    assert driven.pools.moves <= 4 * swings  # of sixteen engines four have to move each way


def test_a_quiet_night_leaves_the_groups_as_they_were() -> None:
    driven = Driven(16)
    driven.epoch(2, 4, 8, 2)
    for _ in range(50):
        driven.epoch(0.5, 0, 0, 0)
    night = driven.serving()
    assert driven.pools.moves <= 2  # while the day's demand was still fading
    assert sum(night) == 16
    driven.now += 8 * 3600
    driven.epoch(0.5, 0, 0, 0)
    assert driven.serving() == night


def test_a_moved_engine_stays() -> None:
    driven = Driven(2, dwell_epochs=5, demand_smoothing=1.0, dead_band_engines=0.0)
    driven.engines.append(engines(3)[-1])
    driven.know()
    driven.epoch(2, 1, 0, 0)
    before = driven.pools.engines_of(1)
    driven.epoch(1, 2, 0, 0)
    (moved,) = set(driven.pools.engines_of(1)) - set(before)
    for _ in range(9):
        driven.epoch(2, 1, 0, 0)
        assert driven.pools.engines_of(1) == [moved]  # the one that had been there goes back
    assert driven.pools.moves == 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_engines_than_groups_are_shared_by_neighbours(count: int) -> None:
    driven = Driven(count)
    driven.epoch(1, 1, 5, 2)
    homes = [[engine.id for engine in driven.pools.engines_of(g)] for g in range(4)]
    assert all(homes)
    assert len({tuple(home) for home in homes}) == count
    assert homes[0] == homes[1]  # the two that ask least
    assert sum(driven.pools.counts()) == count


def test_a_group_without_demand_falls_up_and_gets_an_engine_when_it_has_some() -> None:
    driven = Driven(8)
    driven.epoch(4, 0, 4, 0)
    assert driven.pools.engines_of(1) == driven.pools.engines_of(2)
    assert driven.pools.engines_of(3) == driven.pools.engines_of(2)  # none longer: down
    driven.epoch(4, 0, 4, 1)
    assert driven.serving()[3] == 1
    assert driven.pools.engines_of(3) != driven.pools.engines_of(2)


def test_a_group_whose_engines_are_ill_is_served_by_others_and_nothing_moves() -> None:
    driven = Driven(4)
    driven.epoch(1, 1, 1, 1)
    (lost,) = driven.pools.engines_of(1)
    lost.state = EngineState.OPEN
    assert driven.pools.engines_of(1) == driven.pools.engines_of(2)
    assert not driven.epoch(9, 1, 1, 1)
    assert driven.pools.frozen
    lost.state = EngineState.HALF_OPEN
    assert driven.pools.engines_of(1) == [lost]


@pytest.mark.parametrize("state", [EngineState.GONE, EngineState.DRAINING])
def test_a_group_that_lost_its_only_engine_gets_another(state: EngineState) -> None:
    driven = Driven(8)
    driven.epoch(5, 1, 1, 1)
    (lost,) = driven.pools.engines_of(2)
    lost.state = state
    driven.epoch(5, 1, 1, 1)
    (other,) = driven.pools.engines_of(2)
    assert other is not lost
    assert driven.pools.counts() == [4, 1, 1, 1]


def test_an_engine_that_came_back_is_where_it_was_and_a_new_one_where_it_is_needed() -> None:
    driven = Driven(8)
    for _ in range(4):
        driven.epoch(4, 1, 1, 2)
    again = engines(8)
    assert [driven.pools.know(engine) for engine in again] == [driven.pools.know(engine) for engine in driven.engines]
    new = engines(9)[-1]
    assert driven.pools.know(new) == 0
    assert new in driven.pools.engines_of(0)


def test_workers_that_follow_have_the_same_groups_and_move_nothing() -> None:
    first, second = Driven(8), Driven(8)
    assert first.pools.cut() is None
    first.epoch(4, 1, 1, 2)
    second.epoch(1, 1, 4, 2)  # it saw other requests
    cut = json.loads(json.dumps(first.pools.cut()))
    assert second.pools.follow(cut, second.now)
    assert not second.pools.follow(cut, second.now)
    for epoch in range(3):
        assert [[e.id for e in second.pools.engines_of(g)] for g in range(4)] == [
            [e.id for e in first.pools.engines_of(g)] for g in range(4)
        ]
        assert second.epoch(1, 1, 4, 2) == (epoch == 2)  # nobody says anything any more: it decides for itself


def test_a_cut_of_other_edges_is_not_followed() -> None:
    driven = Driven(2)
    assert not driven.pools.follow({"homes": [0, 0], "groups": {}}, 0.0)
    assert not driven.pools.follow({"homes": [0, 0, 0, 4], "groups": {}}, 0.0)
    assert not driven.pools.follow({"homes": [0, 0, 0, 0], "groups": {"00": 7}}, 0.0)
    assert driven.pools.cut() is None


def test_a_queue_is_demand() -> None:
    driven = Driven(4, demand_smoothing=1.0)
    driven.epoch(2, 2, 0, 0)
    for engine in driven.pools.engines_of(1):
        engine.targets[0].pending_seconds = 60.0  # 3 a second more, over an epoch each
    driven.epoch(2, 2, 0, 0)
    assert driven.serving()[:2] == [1, 3]
    assert driven.pools.demand[:2] == [2.0, 2.0 + 2 * 60.0 / EPOCH_S]


def test_what_runs_is_no_queue() -> None:
    """Long prompts that are computed as they come do not ask for more engines, however long they take."""
    driven = Driven(4, demand_smoothing=1.0)
    driven.epoch(2, 2, 0, 0)
    for engine in driven.pools.engines_of(1):
        engine.targets[0].pending_seconds = engine.targets[0].running_seconds = 60.0
    driven.epoch(2, 2, 0, 0)
    assert driven.serving()[:2] == [2, 2] and driven.pools.demand[:2] == [2.0, 2.0]


@given(
    st.integers(1, 9),
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([0.0, 0.01, 1.0, 5.0, 60.0]), min_size=4, max_size=4),
            st.sets(st.integers(0, 8)),
            st.sampled_from([0.5, 1.0, 30.0]),
        ),
        max_size=12,
    ),
)
def test_whatever_happens_no_group_is_stranded_and_no_engine_lost(
    count: int, history: list[tuple[list[float], set[int], float]]
) -> None:
    driven = Driven(count)
    for demand, lost, epochs in history:
        driven.now += EPOCH_S * (epochs - 1)
        for i, engine in enumerate(driven.engines):
            engine.state = EngineState.OPEN if i in lost else EngineState.READY
        able = [engine for engine in driven.engines if engine.state is EngineState.READY]
        before = driven.pools.moves
        driven.epoch(*demand)
        assert driven.pools.moves - before <= 2
        for g in range(4):
            serving = driven.pools.engines_of(g)
            assert set(serving) <= set(able)
            assert bool(serving) == bool(able)
        assert sum(driven.pools.counts()) == len(able)
