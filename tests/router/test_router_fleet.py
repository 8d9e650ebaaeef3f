"""The registry of engines: who is there, who gets work."""

from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.engine_state import EngineState
from deepinfer_router.fleet import Fleet
from deepinfer_router.roles import Role
from deepinfer_router.target import Load
from deepinfer_router.work import Work

P, D = Role.PREFILL, Role.DECODE


def urls(fleet: Fleet, role: Role, model: str = "") -> list[str]:
    return [target.engine.url for target in fleet.targets(role, model)]


def test_targets_by_role_and_model() -> None:
    fleet = Fleet()
    fleet.add(EngineSpec("http://p", roles=frozenset((P,))))
    fleet.add(EngineSpec("http://d", roles=frozenset((D,)), models=("m",), ranks=2))
    fleet.add(EngineSpec("http://b", models=("n",)))
    assert urls(fleet, P) == ["http://p", "http://b"]
    assert urls(fleet, P, "n") == ["http://p", "http://b"]
    assert urls(fleet, P, "x") == ["http://p"]
    assert urls(fleet, D) == ["http://d", "http://d", "http://b"]
    assert urls(fleet, D, "m") == ["http://d", "http://d"]
    assert urls(fleet, D, "x") == []
    assert urls(fleet, Role.ENCODE) == []
    assert [target.rank for target in fleet.targets(D, "m")] == [0, 1]
    assert fleet.serves("x")
    fleet.remove("http://p")
    assert fleet.serves("m") and not fleet.serves("x")
    for engine in list(fleet.engines):
        fleet.remove(engine)
    assert fleet.serves("x")  # who knows: discovery has found nobody yet


def test_the_same_objects_until_something_changes() -> None:
    """vllm-project/router#299: objects made anew for each request had no load."""
    fleet = Fleet()
    engine = fleet.add(EngineSpec("http://a"))
    first = fleet.targets(D)
    version = fleet.version
    assert fleet.add(EngineSpec("http://a")) is engine
    with fleet.book(engine.targets[0], Work(), D):
        assert fleet.targets(D) is first
        assert fleet.targets(D)[0].active == 1
    assert fleet.version == version


def test_names_that_clients_make_up_leave_nothing() -> None:
    """production-stack#687: tables that clients could grow."""
    fleet = Fleet()
    fleet.add(EngineSpec("http://a"))
    first = fleet.targets(D, "x0")
    assert all(fleet.targets(D, f"x{number}") is first for number in range(100))


def test_an_engine_that_changes() -> None:
    fleet = Fleet()
    engine = fleet.add(EngineSpec("http://a", id="e"))
    assert fleet.add(EngineSpec("http://a", id="e", models=("m",), capacity_tokens=10)) is engine
    assert (engine.models, engine.targets[0].capacity_tokens) == (("m",), 10)
    moved = fleet.add(EngineSpec("http://b", id="e", models=("m",)))
    assert moved is not engine and moved.generation > engine.generation
    assert engine.state is EngineState.GONE
    assert urls(fleet, D) == ["http://b"]
    assert fleet.add(EngineSpec("http://b", id="e", ranks=2)) is not moved
    assert len(fleet.targets(D)) == 2


def test_draining() -> None:
    """production-stack#420: scale-down ended what ran, or sent more."""
    fleet = Fleet()
    engine = fleet.add(EngineSpec("http://a"))
    fleet.add(EngineSpec("http://b"))
    lease = fleet.book(engine.targets[0], Work(), D)
    fleet.drain("http://a")
    assert (urls(fleet, D), engine.active) == (["http://b"], 1)
    fleet.succeeded(engine)
    fleet.failed(engine, "reset")
    assert fleet.add(EngineSpec("http://a")) is engine
    assert urls(fleet, D) == ["http://b"]
    lease.release()
    assert engine.active == 0
    fleet.resume("http://a")
    assert urls(fleet, D) == ["http://a", "http://b"]


def test_unknown_ids_are_no_error() -> None:
    fleet = Fleet()
    fleet.remove("x")
    fleet.drain("x")
    fleet.resume("x")
    assert fleet.version == 0


def test_subscribers_hear_of_each_change() -> None:
    fleet = Fleet()
    versions: list[int] = []
    fleet.subscribe(lambda: versions.append(fleet.version))
    fleet.add(EngineSpec("http://a"))
    fleet.drain("http://a")
    fleet.remove("http://a")
    assert versions == [1, 2, 3]


def test_room_is_told() -> None:
    fleet = Fleet()
    target = fleet.add(EngineSpec("http://a")).targets[0]
    calls: list[int] = []
    fleet.on_room = lambda: calls.append(target.active)
    lease = fleet.book(target, Work(), D)
    lease.release()
    lease.release()
    assert calls == [0]


def test_loads_of_others_add_up() -> None:
    fleet = Fleet()
    target = fleet.add(EngineSpec("http://a")).targets[0]
    target.see_strangers(Load(2, 200, 0.0))
    with fleet.book(target, Work(prompt_tokens=10, expected_output=5), D, 1.0):
        target.see_peers(Load(3, 30, 2.0))
        target.see_peers(Load(4, 40, 2.5))
        assert (target.active, target.kv_tokens, target.pending_seconds) == (7, 255, 3.5)
        assert target.own == (1, 15, 1.0, 0)
    assert (target.active, target.kv_tokens, target.pending_seconds) == (6, 240, 2.5)


def test_a_probed_fleet_waits_for_the_first_good_probe() -> None:
    fleet = Fleet(probed=True)
    engine = fleet.add(EngineSpec("http://a"))
    assert engine.state is EngineState.STARTING and not fleet.targets(D)
    fleet.alive(engine)
    assert urls(fleet, D) == ["http://a"]
