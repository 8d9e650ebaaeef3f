"""Active health: who is asked when, and what becomes of it."""

import asyncio

from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.engine_state import EngineState
from deepinfer_router.fleet import Fleet
from deepinfer_router.fleet_config import FleetConfig
from deepinfer_router.probes import Probes
from deepinfer_router.roles import Role
from deepinfer_router.rounds import Rounds
from deepinfer_router.target import Engine
from deepinfer_router.work import Work

STARTING, READY, SUSPECT = EngineState.STARTING, EngineState.READY, EngineState.SUSPECT
OPEN, HALF_OPEN = EngineState.OPEN, EngineState.HALF_OPEN


class Probed:
    """Two engines whose answers are set: a status, an exception, or None: never."""

    def __init__(self, **config: float) -> None:
        self.now = 100.0
        self.fleet = Fleet(FleetConfig.model_validate(config), probed=True, clock=lambda: self.now)
        self.engines = [self.fleet.add(EngineSpec(f"http://{number}")) for number in range(2)]
        self.answers: dict[Engine, int | Exception | None] = {}
        self.asked: list[str] = []
        self.probes = Probes(self.fleet, self.fetch, lambda: self.now)

    async def fetch(self, engine: Engine, path: str, most_bytes: int) -> tuple[int, bytes]:
        assert path == "/health"
        self.asked.append(engine.id)
        answer = self.answers.get(engine, 200)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return int(answer or 0), b""

    def ask(self, engine: Engine) -> EngineState:
        asyncio.run(self.probes.ask(engine))
        return engine.state


def test_engines_start_when_they_answer() -> None:
    probed = Probed()
    first, second = probed.engines
    probed.answers[first] = ConnectionRefusedError()
    for _ in range(5):
        assert probed.ask(first) is STARTING
    assert probed.ask(second) is READY
    assert [target.engine for target in probed.fleet.targets(Role.DECODE)] == [second]
    probed.answers[first] = 404
    assert probed.ask(first) is READY


def test_failing_probes_open_and_good_ones_half_open() -> None:
    probed = Probed(probe_timeout_s=0.01)
    first, second = probed.engines
    probed.ask(first)
    probed.ask(second)
    # vLLM answers 503 to /health when its core is dead.
    for answer, state in ((503, SUSPECT), (ConnectionResetError(), SUSPECT), (None, OPEN)):
        probed.answers[first] = answer
        assert probed.ask(first) is state
    assert probed.probes._pause_s(first) == float("inf")
    probed.now += 1
    assert probed.probes._pause_s(first) == 1.0
    assert probed.ask(first) is OPEN
    # That probe failed: twice as long until the next.
    probed.now += 1.9
    assert probed.probes._pause_s(first) == float("inf")
    probed.now += 0.1
    probed.answers[first] = 200
    assert probed.ask(first) is HALF_OPEN
    with probed.fleet.book(first.targets[0], Work(), Role.DECODE):
        probed.fleet.succeeded(first)
    assert first.state is READY


def test_those_that_are_not_well_are_asked_sooner() -> None:
    probed = Probed()
    first, second = probed.engines
    probed.ask(second)
    assert [probed.probes._pause_s(engine) for engine in (first, second)] == [1.0, 5.0]
    probed.fleet.failed(second, "reset")
    assert probed.probes._pause_s(second) == 1.0


def test_rounds_ask_each_on_its_beat_and_one_at_a_time() -> None:
    async def main() -> None:
        now = 0.0
        fleet = Fleet(clock=lambda: now)
        quick, stuck, silent = (fleet.add(EngineSpec(name)) for name in ("quick", "stuck", "silent"))
        asked: list[str] = []

        async def ask(engine: Engine) -> None:
            asked.append(engine.id)
            if engine is stuck:
                await asyncio.Event().wait()
            raise RuntimeError("must not end the rounds")

        rounds = Rounds(fleet, ask, lambda engine: float("inf") if engine is silent else 1.0, lambda: now)
        for later in (0.0, 0.4, 1.0, 1.3, 2.0):
            now = later
            assert rounds._tick() == 0.25
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert asked == ["quick", "stuck", "quick", "quick"]
        fleet.remove("quick")
        rounds._tick()
        assert list(rounds._begun) == [stuck]
        task = asyncio.create_task(rounds.run())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert not rounds._asking

    asyncio.run(main())


def test_once_waits_for_all() -> None:
    probed = Probed(probe_timeout_s=0.05)
    probed.answers[probed.engines[1]] = None
    asyncio.run(probed.probes.rounds.once())
    assert [engine.state for engine in probed.engines] == [READY, STARTING]
    assert sorted(probed.asked) == ["http://0", "http://1"]
