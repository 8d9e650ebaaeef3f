"""Waiting for room: at once, fairly, in bounds, and without leaving anything behind."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_router.admission import Admission
from deepinfer_router.admission_config import AdmissionConfig
from deepinfer_router.drain_rate import DrainRate
from deepinfer_router.errors import Refusal
from deepinfer_router.work import Work


class Rooms:
    """So many places; those that have one are counted."""

    def __init__(self, admission: Admission, free: int = 0) -> None:
        self.admission = admission
        self.free = free
        self.log: list[str] = []
        self.given_back = 0

    def place(self, name: str, size: int = 1) -> Callable[[], str | None]:
        def place() -> str | None:
            if self.free < size:
                return None
            self.free -= size
            self.log.append(name)
            return name

        return place

    def leave(self, count: int = 1) -> None:
        self.free += count
        self.admission.pump()

    def give_back(self, placed: str) -> None:
        self.given_back += 1
        self.leave()

    def admit(self, name: str, cost_s: float = 1.0, size: int = 1, **work: Any) -> "asyncio.Task[str]":
        coming = self.admission.admit(Work(**work), cost_s, self.place(name, size), self.give_back)
        return asyncio.get_running_loop().create_task(coming)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def empty(admission: Admission) -> bool:
    """Nothing is left of those that waited."""
    return not admission.waiting and not admission._in_lane and admission._ticker is None


def test_with_room_nothing_waits() -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig(max_waiting=0)), free=1)
        assert await rooms.admission.admit(Work(), 1.0, rooms.place("a"), rooms.give_back) == "a"

    run(test)


def test_room_that_comes_is_given_in_fair_order() -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig()))
        tasks = [rooms.admit(f"much{i}", 10.0, tenant="much") for i in range(3)]
        tasks += [rooms.admit(f"little{i}", 1.0, tenant="little") for i in range(2)]
        await settle()
        assert rooms.admission.waiting == 5
        assert rooms.admission.queues() == {"much": (3, 30.0), "little": (2, 2.0)}
        for _ in tasks:
            rooms.leave()
            await settle()
        assert [await task for task in tasks] == ["much0", "much1", "much2", "little0", "little1"]
        assert rooms.log == ["much0", "little0", "little1", "much1", "much2"]
        assert empty(rooms.admission)

    run(test)


def test_newcomers_do_not_overtake_those_of_their_lane() -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig()))
        first = rooms.admit("first", model="m")
        await settle()
        rooms.free = 1  # and nobody has said so yet
        second = rooms.admit("second", model="m")
        other = rooms.admit("other", model="n")
        await settle()
        assert rooms.log == ["other"]
        rooms.leave(2)
        assert [await first, await second, await other] == ["first", "second", "other"]
        assert rooms.log == ["other", "first", "second"]

    run(test)


def test_one_that_needs_more_is_overtaken_only_for_a_while() -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig(hold_after_s=0.2)))
        large = rooms.admit("large", size=3)
        small = [rooms.admit(f"small{i}", tenant=f"t{i}") for i in range(8)]
        await settle()
        rooms.leave()
        await settle()
        assert rooms.log == ["small0"]
        await asyncio.sleep(0.25)
        for _ in range(3):
            rooms.leave()
            await settle()
        assert rooms.log == ["small0", "large"]
        rooms.leave(8)
        await asyncio.gather(large, *small)

    run(test)


def test_room_that_nobody_announced_is_found() -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig()))
        task = rooms.admit("a")
        await settle()
        rooms.free = 1
        assert await task == "a"
        assert empty(rooms.admission)

    run(test)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"max_waiting": 2}, "queue_full"),
        ({"max_waiting_of_a_tenant": 2}, "tenant_queue_full"),
        ({"max_waiting_cost_s": 5.0}, "queue_full"),
    ],
)
def test_bounds_are_refused_with_when_to_come_back(config: dict[str, float], code: str) -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig(**config)))  # type: ignore[arg-type]
        tasks = [rooms.admit(f"{i}", 2.0, tenant="t") for i in range(2)]
        await settle()
        with pytest.raises(Refusal) as refused:
            await rooms.admit("more", 2.0, tenant="t")
        assert (refused.value.status, refused.value.code) == (429, code)
        assert refused.value.retry_after_s == 1  # nothing has left yet, so nothing is known
        assert f"admission.{next(iter(config))}" in refused.value.message
        rooms.leave(2)
        await asyncio.gather(*tasks)
        assert empty(rooms.admission)

    run(test)


def test_one_alone_may_cost_more_than_may_wait() -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig(max_waiting_cost_s=5.0)))
        task = rooms.admit("huge", 500.0)
        await settle()
        rooms.leave()
        assert await task == "huge"

    run(test)


def test_waiting_ends_with_its_limit_and_with_the_deadline() -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig(max_wait_s=0.05)))
        with pytest.raises(Refusal) as refused:
            await rooms.admit("a", 0.01)
        assert (refused.value.status, refused.value.code) == (429, "queue_timeout")
        now = asyncio.get_running_loop().time()
        with pytest.raises(Refusal) as refused:
            await rooms.admit("b", deadline=now + 0.02)
        assert (refused.value.status, refused.value.code) == (504, "deadline_exceeded")
        with pytest.raises(Refusal) as refused:
            await rooms.admit("c", deadline=now - 1)
        assert (refused.value.status, refused.value.code) == (504, "deadline_exceeded")
        assert empty(rooms.admission)
        assert rooms.log == []

    run(test)


def test_one_that_takes_long_itself_may_wait_longer() -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig(max_wait_s=0.01)))
        task = rooms.admit("long", 20.0)
        with pytest.raises(Refusal):
            await rooms.admit("short", 0.001)
        rooms.leave()
        assert await task == "long"

    run(test)


def test_what_place_raises_is_the_callers_and_the_next_goes_on() -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig()))
        calls = 0

        def place() -> str | None:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise Refusal(404, "model_not_found", "no")
            return None

        broken = asyncio.get_running_loop().create_task(rooms.admission.admit(Work(), 1.0, place, rooms.give_back))
        other = rooms.admit("other", tenant="t")
        await settle()
        rooms.leave()
        assert await other == "other"
        with pytest.raises(Refusal, match="no"):
            await broken
        assert empty(rooms.admission)

    run(test)


def test_a_client_that_leaves_frees_its_place_in_the_queue() -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig()))
        gone, stays = rooms.admit("gone"), rooms.admit("stays")
        await settle()
        gone.cancel()
        rooms.leave()
        assert await stays == "stays"
        assert gone.cancelled()
        assert rooms.log == ["stays"]
        assert empty(rooms.admission)

    run(test)


def test_what_was_booked_for_one_cancelled_in_that_moment_is_given_back() -> None:
    """vllm-project/router#215: counts that stay after a cancellation."""

    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig()))
        task = rooms.admit("a")
        await settle()
        rooms.free = 1
        rooms.admission._run()
        task.cancel()  # it has its place and has not run since
        await settle()
        assert task.cancelled()
        assert (rooms.given_back, rooms.free) == (1, 1)
        assert empty(rooms.admission)

    run(test)


def test_closing_refuses_those_that_wait_and_those_that_come() -> None:
    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig()))
        tasks = [rooms.admit(f"{i}", tenant=f"{i}") for i in range(9)]
        await settle()
        tasks[3].cancel()
        rooms.admission.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [getattr(result, "status", None) for result in results] == [503] * 3 + [None] + [503] * 5
        with pytest.raises(Refusal) as refused:
            await rooms.admit("late")
        assert refused.value.code == "shutting_down"
        assert empty(rooms.admission)

    run(test)


def test_retry_after_is_what_the_queue_takes() -> None:
    rate = DrainRate(memory_s=10.0)
    assert rate.seconds_for(5.0) is None
    rate.pass_to(0.0)
    for second in range(1, 60):
        rate.took(2.0, float(second))
    assert rate.seconds_for(30.0) == pytest.approx(15.0, rel=0.01)
    rate.idle()
    rate.pass_to(1000.0)  # a pause is no slowness
    assert rate.seconds_for(30.0) == pytest.approx(15.0, rel=0.01)
    for second in range(1001, 1060):
        rate.took(1.0, float(second))
    assert rate.seconds_for(30.0) == pytest.approx(30.0, rel=0.05)


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("come"), st.sampled_from("abc"), st.sampled_from([0.1, 1.0, 9.0])),
            st.tuples(st.just("cancel"), st.integers(0, 30), st.none()),
            st.tuples(st.just("room"), st.integers(1, 3), st.none()),
            st.tuples(st.just("settle"), st.none(), st.none()),
        ),
        max_size=40,
    )
)
def test_nothing_leaks_whatever_clients_do(steps: list[tuple[str, Any, Any]]) -> None:
    """vllm-project/router#215, production-stack#1072: every place is with a caller that has it, or free."""

    async def test() -> None:
        rooms = Rooms(Admission(AdmissionConfig(max_waiting=12)), free=1)
        total, tasks = 1, []
        for step, a, b in steps:
            if step == "come":
                tasks.append(rooms.admit(f"{len(tasks)}", b, tenant=a))
            elif step == "cancel" and tasks:
                tasks[a % len(tasks)].cancel()
            elif step == "room":
                total += a
                rooms.leave(a)
            elif step == "settle":
                await settle()
        await settle()
        for task in tasks:
            if not task.done():
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        has_place = sum(isinstance(result, str) for result in results)
        assert rooms.free + has_place == total
        assert empty(rooms.admission)

    run(test)
