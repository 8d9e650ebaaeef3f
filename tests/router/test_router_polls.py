"""Views of loads from polls: what is not this host's, what engines share, who is stuck, who is silent."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.engine_state import EngineState
from deepinfer_router.fleet import Fleet
from deepinfer_router.fleet_config import FleetConfig
from deepinfer_router.http_client import Upstream
from deepinfer_router.polls import _FAILED, Polls
from deepinfer_router.roles import Role
from deepinfer_router.target import NOTHING, Engine, Load, Target
from deepinfer_router.work import Work
from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_server import MockEngine

D = Role.DECODE


class Engines:
    """A fleet, and pages that its engines answer with; None: no answer."""

    def __init__(self, count: int = 1, replicas: int = 1, capacity: int | None = None) -> None:
        self.now = 100.0
        self.fleet = Fleet(FleetConfig(), clock=lambda: self.now)
        self.targets = [
            self.fleet.add(EngineSpec(f"http://{number}", capacity_tokens=capacity)).targets[0]
            for number in range(count)
        ]
        self.pages: dict[Engine, bytes | None] = {}
        self.meanwhile: Callable[[], object] = lambda: None
        self.told: list[tuple[int, int, float]] = []
        self.polls = Polls(self.fleet, self.fetch, lambda: self.now, replicas, lambda *load: self.told.append(load))

    async def fetch(self, engine: Engine, path: str, most_bytes: int) -> tuple[int, bytes]:
        assert (path, most_bytes) == ("/metrics", 8 << 20)
        self.meanwhile()
        page = self.pages.get(engine)
        if page is None:
            raise ConnectionRefusedError
        return 200, page

    def poll(self, target: Target) -> None:
        self.now += 1.0
        asyncio.run(self.polls.ask(target.engine))

    def says(self, target: Target, running: int, kv_share: float = 0.0, steps: int = 0, gaps: int = 0) -> None:
        series = {
            "num_requests_running": running,
            "kv_cache_usage_perc": kv_share,
            "generation_tokens_total": steps,
            "inter_token_latency_seconds_count": gaps,
            "inter_token_latency_seconds_sum": gaps * 0.02,
        }
        self.pages[target.engine] = "".join(
            f'vllm:{name}{{engine="0",model_name="m"}} {value}\n' for name, value in series.items()
        ).encode()


def load(target: Target) -> tuple[int, int]:
    return target.active, target.kv_tokens


def test_what_was_under_way_before_a_restart_counts_until_it_ends() -> None:
    engines = Engines(capacity=1000)
    (target,) = engines.targets
    engines.says(target, 5, 0.5)
    engines.poll(target)
    assert load(target) == (5, 500)
    lease = engines.fleet.book(target, Work(prompt_tokens=100, expected_output=20), D)
    assert load(target) == (6, 620)
    lease.first_token()
    engines.says(target, 4, 0.4)
    engines.poll(target)
    assert load(target) == (4, 420)
    engines.says(target, 1, 0.1)
    engines.poll(target)
    assert load(target) == (1, 120)
    lease.release()
    assert load(target) == (0, 0)


def test_own_requests_that_end_meanwhile_are_no_strangers() -> None:
    engines = Engines(capacity=1000)
    (target,) = engines.targets
    leases = [engines.fleet.book(target, Work(prompt_tokens=100, expected_output=0), D) for _ in range(3)]
    for lease in leases:
        lease.first_token()
    engines.says(target, 3, 0.3)
    engines.meanwhile = lambda: [lease.release() for lease in leases]
    engines.poll(target)
    assert (load(target), target.strangers) == ((0, 0), NOTHING)


def test_alone_a_stranger_counts_when_seen_twice() -> None:
    """An engine's gauges trail by a step: what has just ended would look like somebody else's."""
    for replicas, first in ((1, 0), (2, 7)):
        engines = Engines(replicas=replicas)
        (target,) = engines.targets
        engines.says(target, 0)
        engines.poll(target)
        engines.says(target, 7)
        engines.poll(target)
        assert target.active == first
        engines.poll(target)
        assert target.active == 7


def test_other_workers_are_no_strangers() -> None:
    engines = Engines(capacity=1000)
    (target,) = engines.targets
    target.see_peers(Load(4, 400, 1.0, 400))
    engines.says(target, 6, 0.6)
    engines.poll(target)
    assert (load(target), target.strangers) == ((6, 600), Load(2, 200, 0.0, 200))


def test_shared_prefixes_are_seen_as_room() -> None:
    engines = Engines(capacity=1000)
    (target,) = engines.targets
    for _ in range(4):
        engines.fleet.book(target, Work(prompt_tokens=200, expected_output=25), D).first_token()
    leases = [engines.fleet.book(target, Work(prompt_tokens=200, expected_output=25), D) for _ in range(4)]
    for lease in leases[:3]:
        lease.first_token()
    engines.says(target, 3, 0.2)
    engines.poll(target)
    # Three prompts of 200 are held as one; the fourth is only promised and counts in full.
    assert (target.shared_tokens, load(target)) == (400, (4, 900))


def test_capacity_is_learnt_unless_it_was_told() -> None:
    for told, known in ((None, 1600), (777, 777)):
        engines = Engines(capacity=told)
        (target,) = engines.targets
        engines.says(target, 0)
        info = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1\n'
        engines.pages[target.engine] = (engines.pages[target.engine] or b"") + info
        engines.poll(target)
        assert target.capacity_tokens == known


def test_a_learnt_capacity_may_change_when_the_engine_restarts() -> None:
    engines = Engines()
    (target,) = engines.targets
    for blocks in (100, 50):
        info = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}",engine="0"}} 1\n'
        engines.says(target, 0)
        engines.pages[target.engine] = (engines.pages[target.engine] or b"") + info.encode()
        engines.poll(target)
        assert target.capacity_tokens == 16 * blocks
    engines.says(target, 0)
    engines.poll(target)
    assert target.capacity_tokens == 800


def test_how_often_and_who() -> None:
    engines = Engines()
    engine = engines.targets[0].engine

    def pause_s(replicas: int, leads: bool = True, count: int = 1, **config: float) -> float:
        fleet = Fleet(FleetConfig.model_validate(config))
        for number in range(count):
            fleet.add(EngineSpec(f"http://{number}"))
        return Polls(fleet, engines.fetch, fleet.health._clock, replicas, leads=lambda: leads)._pause_s(engine)

    assert [pause_s(1), pause_s(2), pause_s(2, poll_s=7.0), pause_s(1, False)] == [1.0, 0.2, 7.0, float("inf")]
    assert [pause_s(8, count=1000), pause_s(8, count=1000, poll_s=0.5)] == [2.0, 0.5]
    engine.state = EngineState.OPEN
    assert pause_s(1) == float("inf")


def test_a_silent_engine_passes_for_the_most_loaded() -> None:
    """GAIE#1497: a pod whose last scrape was idle got everything."""
    engines = Engines(3, replicas=8, capacity=1000)
    first, second, silent = engines.targets
    failed = _FAILED.value
    for target, running, share in ((first, 10, 0.1), (second, 30, 0.3), (silent, 1, 0.01)):
        engines.says(target, running, share)
        engines.poll(target)
    engines.pages[silent.engine] = None
    engines.poll(silent)
    assert load(silent) == (1, 10)
    engines.now += 10
    for target in (first, second, silent):
        engines.poll(target)
    assert load(silent) == (30, 300)
    with engines.fleet.book(silent, Work(prompt_tokens=50, expected_output=0), D):
        engines.poll(silent)
        assert load(silent) == (30, 300)
    engines.says(silent, 2, 0.02)
    engines.poll(silent)
    assert load(silent) == (2, 20)
    assert _FAILED.value == failed + 3


def test_alone_own_counts_are_all_there_is() -> None:
    engines = Engines(2)
    first, silent = engines.targets
    engines.says(silent, 3)
    engines.says(first, 50)
    engines.poll(silent)
    engines.pages[silent.engine] = b"no metrics"
    engines.now += 10
    engines.poll(first)
    engines.poll(silent)
    assert silent.active == 0


def test_counters_that_stand_still_are_faults() -> None:
    """vllm#41530: the front end answered, and the engine had stopped computing."""
    engines = Engines(2)
    stuck = engines.targets[0]
    engines.says(stuck, 2, steps=500)
    for _ in range(121):
        engines.poll(stuck)
    assert stuck.engine.state is EngineState.READY
    engines.says(stuck, 2, steps=501)
    for _ in range(121):
        engines.poll(stuck)
    assert stuck.engine.state is EngineState.READY
    for _ in range(3):
        engines.poll(stuck)
    assert stuck.engine.state is EngineState.OPEN


def test_idle_engines_may_stand_still() -> None:
    engines = Engines(2)
    idle = engines.targets[0]
    engines.says(idle, 0, steps=500)
    for _ in range(300):
        engines.poll(idle)
    assert idle.engine.state is EngineState.READY


def test_what_tokens_take_is_told() -> None:
    engines = Engines(capacity=1000)
    (target,) = engines.targets
    for running, gaps in ((3, 100), (4, 150), (4, 150), (2, 10)):
        engines.says(target, running, 0.25, gaps=gaps)
        engines.poll(target)
    assert engines.told == [(4, 250, pytest.approx(0.02))]


def test_engines_that_go_are_forgotten() -> None:
    engines = Engines(2)
    for target in engines.targets:
        engines.says(target, 1)
        engines.poll(target)
    engines.fleet.remove("http://0")
    engines.poll(engines.targets[1])
    assert list(engines.polls._seen) == [engines.targets[1]]


def fetching(upstreams: dict[Engine, Upstream]) -> Callable[[Engine, str, int], Awaitable[tuple[int, bytes]]]:
    async def fetch(engine: Engine, path: str, most_bytes: int) -> tuple[int, bytes]:
        upstream = upstreams.setdefault(engine, Upstream(engine.url))
        response = await upstream.send(b"GET", path.encode(), [], b"")
        return response.status, await response.read(most_bytes)

    return fetch


def test_a_simulated_engine_of_two_ranks_over_http() -> None:
    async def main() -> None:
        server = MockEngine(EngineConfig(ranks=2, capacity_tokens=1 << 16, time_scale=1.0))
        await server.start()
        fleet = Fleet()
        engine = fleet.add(EngineSpec(server.url, ranks=2))
        upstreams: dict[Engine, Upstream] = {}
        upstream = upstreams[engine] = Upstream(server.url)
        polls = Polls(fleet, fetching(upstreams), asyncio.get_running_loop().time)
        await polls.rounds.once()
        assert [target.capacity_tokens for target in engine.targets] == [1 << 16] * 2
        assert [target.active for target in engine.targets] == [0, 0]
        body = b'{"model": "mock", "prompt": "hello there", "max_tokens": 4000, "stream": true}'
        head = [(b"content-type", b"application/json"), (b"x-data-parallel-rank", b"1")]
        response = await upstream.send(b"POST", b"/v1/completions", head, body)
        # Not booked here: somebody else's, to this fleet.
        async with asyncio.timeout(30):
            while engine.targets[1].active != 1 or not engine.targets[1].kv_tokens:
                await polls.rounds.once()
        assert engine.targets[0].active == 0
        response.cancel()
        async with asyncio.timeout(30):
            while engine.targets[1].active or engine.targets[1].kv_tokens:
                await polls.rounds.once()
        await upstream.close()
        await server.stop()

    asyncio.run(main())
