"""Threads for transfers: order, deadlines, and the small parts beside them."""

import os
from collections.abc import Callable, Sequence
from threading import Event, Lock
from time import monotonic, sleep
from typing import cast

import pytest

from deepinfer_kvstore.breaker import Breaker
from deepinfer_kvstore.entry import Location, Place
from deepinfer_kvstore.follower import Applied
from deepinfer_kvstore.io import IoThreads
from deepinfer_kvstore.load_run import Reads
from deepinfer_kvstore.loads import Loads
from deepinfer_kvstore.publisher import Publication, Publisher
from deepinfer_kvstore.slot_run import SlotRun, runs_of
from deepinfer_kvstore.suspects import MAX_KEYS, Suspects
from deepinfer_kvstore.transfer import Transfer
from store_case import key


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Job:
    """Says in `log` what happened to it."""

    def __init__(
        self, name: str, log: list[str], act: Callable[[], object] = lambda: None, *,
        is_store: bool = False, seconds: float = 60.0,
    ) -> None:  # fmt: skip
        self.is_store = is_store
        self.deadline = monotonic() + seconds
        self._name, self._log, self._act = name, log, act

    def run(self, bounce: memoryview) -> None:
        assert len(bounce) == 8192
        self._act()
        self._log.append(f"{self._name} ran")

    def expire(self) -> None:
        self._log.append(f"{self._name} expired")

    def overran(self) -> None:
        self._log.append(f"{self._name} overran")


def until(what: Callable[[], bool]) -> None:
    deadline = monotonic() + 30
    while not what():
        assert monotonic() < deadline
        sleep(0.005)


def test_loads_come_before_stores_that_came_first() -> None:
    threads, log, gate, begun = IoThreads(1, 8192), list[str](), Event(), Event()
    threads.submit(Job("gate", log, lambda: (begun.set(), gate.wait(30))))
    assert begun.wait(30)
    for number in range(3):
        threads.submit(Job(f"store {number}", log, is_store=True))
        threads.submit(Job(f"load {number}", log))
    assert threads.waiting() == 6
    gate.set()
    until(lambda: len(log) == 7)
    assert log == ["gate ran", *(f"load {n} ran" for n in range(3)), *(f"store {n} ran" for n in range(3))]
    assert threads.close(30)


def test_stores_take_at_most_half_of_the_threads() -> None:
    threads, log, gate = IoThreads(4, 8192), list[str](), Event()
    lock, running, most = Lock(), 0, 0

    def act() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait(30)
        with lock:
            running -= 1

    for number in range(8):
        threads.submit(Job(f"store {number}", log, act, is_store=True))
    until(lambda: running == 2)
    threads.submit(Job("load", log))
    until(lambda: log == ["load ran"])
    gate.set()
    until(lambda: len(log) == 9)
    assert most == 2
    assert threads.close(30)


def test_jobs_behind_a_stuck_one_expire_and_it_is_told_once() -> None:
    threads, log, gate, begun = IoThreads(1, 8192), list[str](), Event(), Event()
    stuck = Job("stuck", log, lambda: (begun.set(), gate.wait(30)))
    threads.submit(stuck)
    assert begun.wait(30)
    threads.submit(Job("late", log, seconds=60.0))
    early = Job("early", log, seconds=0.05)
    stuck.deadline = early.deadline + 0.01  # which is looked at when the next job comes
    threads.submit(early)
    until(lambda: "stuck overran" in log)
    assert log == ["early expired", "stuck overran"]
    gate.set()
    until(lambda: len(log) == 4)
    assert log[2:] == ["stuck ran", "late ran"]
    assert threads.close(30)


def test_closing_expires_what_waits_and_takes_no_more() -> None:
    threads, log, gate, begun = IoThreads(1, 8192), list[str](), Event(), Event()
    threads.submit(Job("running", log, lambda: (begun.set(), gate.wait(30))))
    assert begun.wait(30)
    threads.submit(Job("waiting", log))
    assert not threads.close(0.01)
    threads.submit(Job("after", log))
    assert log == ["waiting expired", "after expired"]
    gate.set()
    assert threads.close(30) and log[2:] == ["running ran"]


def test_an_error_of_the_program_ends_neither_thread_nor_service(caplog: pytest.LogCaptureFixture) -> None:
    threads, log = IoThreads(1, 8192), list[str]()
    threads.submit(Job("wrong", log, lambda: 1 / 0))
    threads.submit(Job("right", log))
    until(lambda: log == ["right ran"])
    assert "an error of the program" in caplog.text
    assert threads.close(30)


def test_a_breaker_opens_probes_and_closes() -> None:
    clock = Clock()
    breaker = Breaker(2, 10.0, clock)
    assert not breaker.failed() and breaker.admit() and not breaker.is_open()
    assert breaker.failed(), "this one opened it"
    assert breaker.is_open() and not breaker.admit()
    clock.now = 10.0
    assert not breaker.is_open() and breaker.admit(), "the probe"
    assert breaker.is_open() and not breaker.admit(), "one of them"
    assert not breaker.failed() and breaker.is_open()
    clock.now = 20.0
    assert breaker.admit()
    breaker.succeeded()
    assert not breaker.is_open() and breaker.admit() and breaker.admit()


def test_suspects_are_bounded_and_forgiven() -> None:
    clock = Clock()
    suspects = Suspects(60.0, clock)
    suspects.add(key(1))
    clock.now = 59.0
    suspects.add(key(2))
    assert key(1) in suspects and key(3) not in suspects
    clock.now = 60.0
    assert key(1) not in suspects and key(2) in suspects
    suspects.clear(key(2))
    suspects.clear(key(2))
    assert key(2) not in suspects
    for number in range(MAX_KEYS + 1):
        suspects.add(number.to_bytes(34, "big"))
    assert bytes(34) not in suspects and (1).to_bytes(34, "big") in suspects


def runs(places: list[Place], limit: int) -> list[SlotRun]:
    numbers = range(len(places))
    buffers = [memoryview(bytes(number)) for number in numbers]
    return list(runs_of(numbers, places, [key(number) for number in numbers], buffers, limit))


def test_neighbouring_slots_are_one_run_whatever_order_they_are_asked_for_in() -> None:
    """# 3FS#292: one read of many blocks, where a file a block is 50 MB/s."""
    slots = [(1, 0, 5), (1, 0, 3), (1, 0, 4), (1, 1, 6), (2, 0, 6), (1, 0, 9), (1, 0, 6)]
    found = runs([(*slot, 8, generation) for generation, slot in enumerate(slots, 1)], 3)
    assert [(run.writer, run.slab, run.first, run.generations) for run in found] == [
        (1, 0, 3, [2, 3, 1]), (1, 0, 6, [7]), (1, 0, 9, [6]), (1, 1, 6, [4]), (2, 0, 6, [5]),
    ]  # fmt: skip
    for run in found:
        assert run.keys == [key(number) for number in run.numbers]
        assert run.generations == [number + 1 for number in run.numbers]
        assert [len(buffer) for buffer in run.buffers] == run.numbers
    assert found[0].part(1, 2) == SlotRun(1, 0, 4, [2], [key(2)], [3], [memoryview(bytes(2))])
    assert found[0].location(2) == Location(1, 0, 5, 1)
    assert runs([], 3) == []
    assert [len(run.keys) for run in runs([(1, 0, 5, 8, 1), (1, 0, 5, 8, 1)], 3)] == [1, 1]


def test_runs_are_equal_and_larger_while_every_core_copies() -> None:
    threads, gate, begun = IoThreads(1, 8192), Event(), Event()
    loads = Loads(threads, cast("Reads", None), lambda keys: [None] * len(keys), lambda _: None, 35, 280)
    assert [loads._run_slots(blocks) for blocks in (1, 35, 36, 96)] == [1, 35, 18, 32]
    threads.submit(Job("gate", [], lambda: (begun.set(), gate.wait(30))))
    assert begun.wait(30) and threads.active() == 1
    jobs = [Job("load", []) for _ in os.sched_getaffinity(0)]
    threads.submit_loads(jobs)
    assert threads.active() == len(jobs) + 1
    assert [loads._run_slots(blocks) for blocks in (1, 35, 36, 96, 500)] == [1, 35, 36, 96, 250]
    gate.set()
    until(lambda: threads.active() == 0)
    threads.close(1)
    late = list[str]()
    threads.submit_loads([Job("late", late), Job("later", late)])
    assert late == ["late expired", "later expired"]


def test_what_waits_is_published_in_one_round() -> None:
    appended: list[list[int]] = []
    gate, begun = Event(), Event()

    def append(records: object) -> int:
        appended.append(list(records))  # type: ignore[call-overload]
        begun.set()
        assert gate.wait(30)
        return len(appended[-1])

    done: list[tuple[str, int]] = []
    publisher = Publisher(append, Applied, lambda: None, 60.0)
    publish = publisher.publish
    publish(Publication([1], lambda kept: done.append(("a", kept))))  # type: ignore[list-item]
    assert begun.wait(30)
    publish(Publication([2, 3], lambda kept: done.append(("b", kept))))  # type: ignore[list-item]
    publish(Publication([4], lambda kept: done.append(("c", kept))))  # type: ignore[list-item]
    gate.set()
    assert publisher.sync(30)
    assert appended == [[1], [2, 3, 4]] and done == [("a", 1), ("b", 2), ("c", 1)]
    assert publisher.close(30)
    publish(Publication([5], lambda kept: done.append(("d", kept))))  # type: ignore[list-item]
    assert done[-1] == ("d", 0) and not publisher.sync(0.01)


def test_a_callback_cannot_wait_for_its_own_thread() -> None:
    synced: list[bool] = []
    publisher = Publisher(lambda records: 1, Applied, lambda: None, 60.0)
    publisher.publish(Publication([1], lambda kept: synced.append(publisher.sync(30))))  # type: ignore[list-item]
    assert publisher.sync(30) and synced == [False]
    assert publisher.close(30)


def test_a_journal_that_took_a_part_publishes_the_first_ones() -> None:
    done: list[int] = []
    publisher = Publisher(lambda records: 3, Applied, lambda: None, 60.0)
    with publisher._changed:  # both in one round
        publisher._waiting += [Publication([1, 2], done.append), Publication([3, 4], done.append)]  # type: ignore[list-item]
        publisher._changed.notify_all()
    assert publisher.sync(30) and done == [2, 1]
    assert publisher.close(30)


def test_what_a_journal_did_not_take_of_what_folding_said_is_appended_later() -> None:
    """The index says once that a block has lost to a rival: forgotten, its slot would never be free again."""
    taken: list[object] = []
    room = [0, 1, 10]

    def append(records: Sequence[object]) -> int:
        kept = list(records)[: room.pop(0)]
        taken.extend(kept)
        return len(kept)

    said = [Applied(superseded=["x", "y"])]  # type: ignore[list-item]
    publisher = Publisher(append, lambda: said.pop() if said else Applied(), lambda: None, 60.0)
    for expected in ([], ["x"], ["x", "y"], ["x", "y"]):
        assert publisher.sync(30) and taken[: len(expected)] == expected
    assert taken == ["x", "y"] and publisher.close(30)


def test_blocks_may_be_settled_together() -> None:
    transfer, told = Transfer(3, 0.0), list[Transfer]()
    transfer.when_done(told.append)
    transfer.settle_all([0, 2], True, 10)
    transfer.settle_all([], True)
    assert not transfer.done() and transfer.results() == [True, False, True] and told == []
    transfer.settle_all([1], False, 99)
    assert transfer.done() and transfer.bytes_moved == 10 and told == [transfer]
