"""Counts of leases: exact, given back once, whatever happens in between."""

import asyncio
import gc
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.fleet import Fleet
from deepinfer_router.lease import _LOST, Lease
from deepinfer_router.roles import Role
from deepinfer_router.seconds import countable
from deepinfer_router.target import NOTHING, Load, Target
from deepinfer_router.work import Work

ROLES = frozenset(Role)
SPEC = EngineSpec("http://a:1", id="a", roles=ROLES)


def one() -> tuple[Fleet, Target]:
    fleet = Fleet()
    return fleet, fleet.add(SPEC).targets[0]


def load(target: Target) -> Load:
    return Load(target.active, target.kv_tokens, target.pending_seconds, target.held_tokens)


def test_decode_reserves_converts_and_grows() -> None:
    fleet, target = one()
    lease = fleet.book(target, Work(prompt_tokens=100, expected_output=10), Role.DECODE, seconds=0.5)
    assert load(target) == (1, 110, 0.5, 0)
    lease.first_token(1.0)
    assert load(target) == (1, 110, 0.0, 100)
    lease.tokens(10)
    assert load(target) == (1, 110, 0.0, 110)
    lease.tokens(3)
    assert load(target) == (1, 113, 0.0, 113)
    lease.release("done")
    assert load(target) == NOTHING


@pytest.mark.parametrize(("stage", "kv_tokens"), [(Role.PREFILL, 100), (Role.DECODE, 110), (Role.ENCODE, 0)])
def test_what_a_stage_takes(stage: Role, kv_tokens: int) -> None:
    fleet, target = one()
    with fleet.book(target, Work(prompt_tokens=100, expected_output=10), stage, seconds=0.25):
        assert load(target) == (1, kv_tokens, 0.25, 0)
    assert load(target) == NOTHING


def test_released_once() -> None:
    """sglang-omni#931: counters that went negative."""
    fleet, target = one()
    lease = fleet.book(target, Work(prompt_tokens=5), Role.DECODE, 1.0)
    for outcome in ("failed", "done", "done"):
        lease.release(outcome)
    lease.first_token(0)
    lease.tokens(7)
    assert (lease.outcome, load(target)) == ("failed", NOTHING)


def test_cancellation_gives_back() -> None:
    """vllm-project/router#215: phantom counts after cancelled requests."""
    fleet, target = one()

    async def request() -> None:
        with fleet.book(target, Work(prompt_tokens=5), Role.DECODE, 1.0):
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        assert target.active == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert load(target) == NOTHING


def test_a_forgotten_lease_gives_back() -> None:
    """production-stack#1072: maps that only grew."""
    fleet, target = one()
    before = _LOST.value
    fleet.book(target, Work(prompt_tokens=5), Role.DECODE, 1.0)
    gc.collect()
    assert (load(target), _LOST.value) == (NOTHING, before + 1)


def test_a_failing_listener_does_not_stop_the_release() -> None:
    fleet, target = one()

    def listener() -> None:
        raise RuntimeError("listener")

    lease = fleet.book(target, Work(), Role.DECODE)
    fleet.on_room = listener
    lease.release("done")
    assert load(target) == NOTHING


def test_an_old_lease_leaves_new_counts_alone() -> None:
    """vllm-project/router#215: a worker that came back took the counts of its former life."""
    fleet, old = one()
    lease = fleet.book(old, Work(prompt_tokens=5), Role.DECODE)
    fleet.remove("a")
    new = fleet.add(SPEC).targets[0]
    assert new is not old and new.engine.generation > old.engine.generation
    fresh = fleet.book(new, Work(prompt_tokens=7, expected_output=0), Role.DECODE)
    lease.release("failed")
    assert load(new) == (1, 7, 0.0, 0)
    fresh.release()


def test_seconds_are_exact() -> None:
    for seconds in (0.1, 1e-7, 12345.678, 1 / 3):
        assert Fraction(countable(seconds)) * 2**20 % 1 == 0
        assert abs(countable(seconds) - seconds) <= 2**-21
    assert [countable(s) for s in (float("nan"), float("inf"), -1.0, 1e300)] == [0, 0, 0, 0]


class Counts(RuleBasedStateMachine):
    """The counters beside a plain list of the leases that are out."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(clock=lambda: 0.0)
        self.out: dict[Lease, list[int]] = {}
        """Each lease: prompt, expected output, generated, in units of 2^-20 s: pending."""
        self.seen: list[Target] = []
        self.add(0, 1)

    @rule(name=st.integers(0, 2), ranks=st.integers(1, 2))
    def add(self, name: int, ranks: int) -> None:
        engine = self.fleet.add(EngineSpec(f"http://{name}", ranks=ranks, roles=ROLES))
        self.seen += [target for target in engine.targets if target not in self.seen]

    @rule(name=st.integers(0, 2))
    def remove(self, name: int) -> None:
        self.fleet.remove(f"http://{name}")

    @rule(name=st.integers(0, 2))
    def drain(self, name: int) -> None:
        self.fleet.drain(f"http://{name}")

    @rule(name=st.integers(0, 2))
    def resume(self, name: int) -> None:
        self.fleet.resume(f"http://{name}")

    @rule(name=st.integers(0, 2), what=st.sampled_from(("succeeded", "failed", "pressured", "alive")))
    def told(self, name: int, what: str) -> None:
        engine = self.fleet.engines.get(f"http://{name}")
        if engine is not None:
            getattr(self.fleet, what)(engine, *(("reset",) if what == "failed" else ()))

    @rule(data=st.data(), active=st.integers(0, 99), kv=st.integers(0, 10**7), peers=st.booleans())
    def poll(self, data: st.DataObject, active: int, kv: int, peers: bool) -> None:
        target = data.draw(st.sampled_from(self.seen))
        (target.see_peers if peers else target.see_strangers)(Load(active, kv, active / 2, kv // 2))
        self.fleet.loads_changed()

    @rule(
        target=leases,
        data=st.data(),
        stage=st.sampled_from(Role),
        prompt=st.integers(0, 10**6),
        expected=st.integers(0, 1000),
        seconds=st.floats(0, 1e6),
    )
    def book(self, data: st.DataObject, stage: Role, prompt: int, expected: int, seconds: float) -> Lease:
        target = data.draw(st.sampled_from(self.seen))
        lease = self.fleet.book(target, Work(prompt_tokens=prompt, expected_output=expected), stage, seconds)
        prompt = 0 if stage is Role.ENCODE else prompt
        self.out[lease] = [prompt, expected if stage is Role.DECODE else 0, -1, round(seconds * 2**20)]
        return lease

    @rule(lease=leases)
    def first_token(self, lease: Lease) -> None:
        lease.first_token(1.0)
        if lease in self.out:
            self.out[lease][2] = max(0, self.out[lease][2])
            self.out[lease][3] = 0

    @rule(lease=leases, count=st.integers(-1, 2000))
    def tokens(self, lease: Lease, count: int) -> None:
        lease.tokens(count)
        if count > 0 and lease in self.out:
            self.out[lease][2] = max(0, self.out[lease][2]) + count
            self.out[lease][3] = 0

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        lease.release("done")
        self.out.pop(lease, None)

    @rule(lease=leases)
    def release_early(self, lease: Lease) -> None:
        lease.release("failed")
        self.out.pop(lease, None)

    @invariant()
    def counters_are_sums_of_what_is_out(self) -> None:
        for target in self.seen:
            mine = [counts for lease, counts in self.out.items() if lease.target is target]
            kv_tokens = sum(prompt + max(expected, made) for prompt, expected, made, _ in mine)
            pending = Fraction(sum(units for *_, units in mine), 2**20)
            held_tokens = sum(prompt + made for prompt, _, made, _ in mine if made >= 0)
            assert target.own == (len(mine), kv_tokens, pending, held_tokens)
            waiting = [units for *_, units in mine if units]
            assert [seconds * 2**20 for seconds in target.prefills.values()] == waiting
            assert target.running_seconds == next(iter(target.prefills.values()), 0.0)
            assert min(load(target)) >= 0

    @invariant()
    def only_those_that_get_work_are_open(self) -> None:
        known = [target for engine in self.fleet.engines.values() for target in engine.targets]
        for role in Role:
            for target in self.fleet.targets(role):
                assert target in known and target.engine.state in ("ready", "suspect", "half_open")
                assert target.window is None or target.own.active < target.window

    def teardown(self) -> None:
        for lease in list(self.out):
            lease.release("failed")
        for target in self.seen:
            assert target.own == NOTHING
            target.see_peers(NOTHING)
            target.see_strangers(NOTHING)
            assert load(target) == NOTHING


TestCounts = Counts.TestCase
TestCounts.settings = settings(max_examples=60, stateful_step_count=40)
