"""States of engines: what faults, pressure, probes and successes make of them."""

from deepinfer_router.breaker import Breaker
from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.engine_state import EngineState
from deepinfer_router.fleet import Fleet
from deepinfer_router.fleet_config import FleetConfig
from deepinfer_router.roles import Role
from deepinfer_router.target import Engine, Load
from deepinfer_router.work import Work

D = Role.DECODE
READY, SUSPECT, OPEN, HALF_OPEN = EngineState.READY, EngineState.SUSPECT, EngineState.OPEN, EngineState.HALF_OPEN


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def some(count: int = 3) -> tuple[Fleet, list[Engine], Clock]:
    clock = Clock()
    fleet = Fleet(FleetConfig(), clock=clock)
    engines = [fleet.add(EngineSpec(f"http://{number}")) for number in range(count)]
    clock.now += 60
    return fleet, engines, clock


def open_ids(fleet: Fleet) -> list[str]:
    return [target.engine.id[-1] for target in fleet.targets(D)]


def fail(fleet: Fleet, engine: Engine, times: int = 3) -> None:
    for _ in range(times):
        fleet.failed(engine, "reset")


def opens_after(pattern: str, limit: int = 1000) -> int | None:
    """Requests until a breaker opens that sees these outcomes again and again: F a fault, s a success."""
    breaker = Breaker(FleetConfig())
    for number in range(limit):
        if pattern[number % len(pattern)] == "s":
            breaker.succeeded()
        elif breaker.failed(number / 100):
            return number + 1
    return None


def test_what_opens_a_circuit() -> None:
    assert opens_after("F") == 3
    assert opens_after("FFs") == 5
    assert opens_after("Fs") == 9
    assert opens_after("Fss") is None
    assert opens_after("F" + 99 * "s") is None


def test_three_faults_open_and_old_ones_are_forgotten() -> None:
    fleet, (engine, *_), clock = some()
    fail(fleet, engine, 2)
    assert (engine.state, open_ids(fleet)) == (SUSPECT, ["0", "1", "2"])
    clock.now += 10.1
    fail(fleet, engine, 2)
    assert engine.state is SUSPECT
    fail(fleet, engine, 1)
    assert (engine.state, open_ids(fleet)) == (OPEN, ["1", "2"])


def test_a_suspect_is_cleared_by_successes_or_a_late_probe() -> None:
    fleet, (first, second, _), clock = some()
    fail(fleet, first, 1)
    fleet.succeeded(first)
    assert first.state is SUSPECT
    fleet.succeeded(first)
    assert first.state is READY
    fail(fleet, second, 2)
    fleet.alive(second)
    assert second.state is SUSPECT
    clock.now += 10.1
    fleet.alive(second)
    assert second.state is READY


def test_half_open_lets_one_request_by_and_backs_off_twice_as_long() -> None:
    fleet, (engine, *_), clock = some()
    fail(fleet, engine)
    for pause in (1, 2, 4, 8, 16, 30, 30):
        clock.now += pause - 0.01
        fleet.alive(engine)
        assert engine.state is OPEN
        clock.now += 0.01
        fleet.alive(engine)
        assert (engine.state, open_ids(fleet)) == (HALF_OPEN, ["0", "1", "2"])
        lease = fleet.book(engine.targets[0], Work(), D)
        assert open_ids(fleet) == ["1", "2"]
        lease.release("failed")
        fail(fleet, engine, 1)
        assert engine.state is OPEN


def test_recovery_starts_slowly_and_forgets() -> None:
    fleet, (engine, *_), clock = some()
    fail(fleet, engine)
    clock.now += 1
    fleet.alive(engine)
    with fleet.book(engine.targets[0], Work(), D):
        fleet.succeeded(engine)
    assert (engine.state, open_ids(fleet)) == (READY, ["0", "1", "2"])
    assert engine.targets[0].uncertain_until == clock.now + 30
    fail(fleet, engine)
    clock.now += 1
    fleet.alive(engine)
    assert engine.state is HALF_OPEN


def test_the_last_engine_stays_with_one_request_at_a_time() -> None:
    """sglang#25811, sglang#39464: circuits of all engines opened, and the whole fleet was out."""
    fleet, (first, second), _ = some(2)
    fail(fleet, first)
    fail(fleet, second, 20)
    assert (first.state, second.state, open_ids(fleet)) == (OPEN, SUSPECT, ["1"])
    lease = fleet.book(second.targets[0], Work(), D)
    assert open_ids(fleet) == []
    lease.release("failed")
    assert open_ids(fleet) == ["1"]
    for _ in range(6):
        fleet.succeeded(second)
    assert second.state is READY


def test_the_last_engine_opens_once_another_is_back() -> None:
    fleet, (first, second), clock = some(2)
    fail(fleet, first)
    fail(fleet, second)
    clock.now += 1
    fleet.alive(first)
    fleet.succeeded(first)
    assert first.state is READY
    fail(fleet, second)
    assert (second.state, open_ids(fleet)) == (OPEN, ["0"])


def test_last_of_a_role_and_of_a_model() -> None:
    fleet = Fleet(FleetConfig(), clock=Clock())
    both = fleet.add(EngineSpec("http://b"))
    decode = fleet.add(EngineSpec("http://d", roles=frozenset((D,)), models=("m",)))
    named = fleet.add(EngineSpec("http://n", models=("n",)))
    fail(fleet, decode)
    assert decode.state is OPEN
    fail(fleet, both)
    assert both.state is OPEN
    fail(fleet, named)
    assert named.state is SUSPECT


def test_an_open_engine_is_tried_at_once_when_the_others_go() -> None:
    for leave in ("remove", "drain"):
        fleet, (first, second), _ = some(2)
        fail(fleet, first)
        getattr(fleet, leave)(second.id)
        assert (first.state, open_ids(fleet)) == (SUSPECT, ["0"])


def test_an_open_engine_is_tried_at_once_when_the_others_cannot_be_reached() -> None:
    """A refused connection says more than a fault of before."""
    fleet, (first, second), clock = some(2)
    fail(fleet, first)
    fleet.failed(second, "connect", unreachable=True)
    assert (first.state, second.state, open_ids(fleet)) == (SUSPECT, SUSPECT, ["0", "1"])
    for _ in range(2):
        fleet.failed(second, "connect", unreachable=True)
    assert (first.state, second.state, open_ids(fleet)) == (SUSPECT, OPEN, ["0"])
    # As long as nobody can be reached one is enough.
    fail(fleet, first, 1)
    for _ in range(2):
        fleet.failed(first, "connect", unreachable=True)
    assert (first.state, second.state, open_ids(fleet)) == (SUSPECT, OPEN, ["0"])
    clock.now += 60
    fleet.alive(second)
    assert open_ids(fleet) == ["0", "1"]


def test_pressure_halves_once_a_second_and_successes_give_back() -> None:
    """sglang#39464: a busy engine's 503 was counted as its death."""
    fleet, (engine, *_), clock = some()
    target = engine.targets[0]
    leases = [fleet.book(target, Work(), D) for _ in range(8)]
    for _ in range(50):
        fleet.pressured(engine)
    assert (engine.state, target.window, open_ids(fleet)) == (READY, 4, ["1", "2"])
    for lease in leases[:4]:
        lease.release()
    assert open_ids(fleet) == ["1", "2"]
    fleet.succeeded(engine)
    assert (target.window, open_ids(fleet)) == (5, ["0", "1", "2"])
    clock.now += 1
    fleet.pressured(engine)
    assert target.window == 2
    clock.now += 30.1
    fleet.succeeded(engine)
    assert target.window is None
    for lease in leases:
        lease.release()
    clock.now += 1
    fleet.pressured(engine)
    assert (target.window, open_ids(fleet)) == (1, ["0", "1", "2"])


def test_pressure_that_others_make_keeps_nobody_out() -> None:
    fleet, (engine, *_), _ = some()
    (target,) = engine.targets
    target.see_strangers(Load(100, 0))
    target.see_peers(Load(50, 0))
    lease = fleet.book(target, Work(), D)
    fleet.pressured(engine)
    assert (target.window, open_ids(fleet)) == (1, ["1", "2"])
    lease.release()
    assert open_ids(fleet) == ["0", "1", "2"]


def test_an_engine_fails_with_all_its_ranks() -> None:
    clock = Clock()
    fleet = Fleet(FleetConfig(), clock=clock)
    engine = fleet.add(EngineSpec("http://a", ranks=4))
    fleet.add(EngineSpec("http://b"))
    fail(fleet, engine)
    assert [target.engine.url for target in fleet.targets(D)] == ["http://b"]


def test_what_is_told_of_a_former_life_is_not_heard() -> None:
    fleet, (engine, *_), _ = some()
    fleet.remove(engine.id)
    new = fleet.add(EngineSpec("http://0"))
    fail(fleet, engine)
    fleet.pressured(engine)
    fleet.succeeded(engine)
    fleet.alive(engine)
    assert (new.state, new.targets[0].window, engine.state) == (READY, None, EngineState.GONE)
