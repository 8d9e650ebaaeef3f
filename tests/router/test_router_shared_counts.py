"""Counts of a host's workers in shared memory: sums are exact, whoever comes, goes or is killed."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deepinfer_router.decode import DecodePolicy
from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.fleet import Fleet
from deepinfer_router.lease import Lease
from deepinfer_router.peer_counts import SIZE, PeerCounts, Sums
from deepinfer_router.roles import Role
from deepinfer_router.shared_counts import SharedCounts
from deepinfer_router.target import NOTHING, Load, Target
from deepinfer_router.work import Work

D = Role.DECODE
WORKER = Path(__file__).with_name("counting_worker.py")


def total(loads: list[Load]) -> Load:
    return Load(*(sum(column) for column in zip(*loads, strict=True))) if loads else NOTHING


def seen(target: Target) -> Load:
    return Load(target.active, target.kv_tokens, target.pending_seconds, target.held_tokens)


class Worker:
    """One worker of several in this process."""

    def __init__(self, directory: Path, ids: list[str]) -> None:
        self.now = 0.0
        self.fleet = Fleet(clock=lambda: 0.0)
        for id in ids:
            self.fleet.add(EngineSpec(f"http://{id}", ranks=2))
        self.counts = SharedCounts(self.fleet, directory, lambda: self.now)
        self.leases: list[Lease] = []

    def fold(self) -> None:
        self.now += 1.0
        self.counts.fold()

    def crash(self) -> None:
        """As a process that was killed: nothing is written or removed, and its lock is free."""
        self.counts._map.close()
        os.close(self.counts._file)
        self.counts._file = -1

    def targets(self) -> dict[tuple[str, int], Target]:
        return {(e.id, target.rank): target for e in self.fleet.engines.values() for target in e.targets}


class Workers(RuleBasedStateMachine):
    """Workers with their own views of which engines there are, beside a plain sum of their leases."""

    @initialize()
    def begin(self) -> None:
        self.directory = TemporaryDirectory()
        self.workers: list[Worker] = []
        self.old: list[Worker] = []
        self.join()

    @rule()
    def join(self) -> None:
        if len(self.workers) < 4:
            self.workers.append(Worker(Path(self.directory.name), ["a", "b"]))

    @rule(data=st.data(), tokens=st.integers(0, 10**6), seconds=st.floats(0, 100))
    def book(self, data: st.DataObject, tokens: int, seconds: float) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        targets = list(worker.targets().values())
        if targets:
            target = data.draw(st.sampled_from(targets))
            worker.leases.append(worker.fleet.book(target, Work(prompt_tokens=tokens), D, seconds))

    @rule(data=st.data(), count=st.integers(0, 999))
    def stream(self, data: st.DataObject, count: int) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        if worker.leases:
            data.draw(st.sampled_from(worker.leases)).tokens(count)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        if worker.leases:
            worker.leases.pop(data.draw(st.integers(0, len(worker.leases) - 1))).release()

    @rule(data=st.data(), id=st.sampled_from("abc"), there=st.booleans())
    def discover(self, data: st.DataObject, id: str, there: bool) -> None:
        fleet = data.draw(st.sampled_from(self.workers)).fleet
        if there:
            fleet.add(EngineSpec(f"http://{id}", ranks=2))
        else:
            fleet.remove(f"http://{id}")

    @rule(data=st.data(), active=st.integers(0, 99), kv_tokens=st.integers(0, 10**6), capacity=st.integers(1, 10**6))
    def poll(self, data: st.DataObject, active: int, kv_tokens: int, capacity: int) -> None:
        leader = self.workers[0]
        targets = list(leader.targets().values())
        if targets:
            target = data.draw(st.sampled_from(targets))
            target.see_strangers(Load(active, kv_tokens, 0.0, kv_tokens))
            target.capacity_tokens, target.shared_tokens = capacity, kv_tokens // 2
            assert leader.fleet.touched is not None
            leader.fleet.touched.add(target)

    @rule(data=st.data())
    def fold(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.workers)).fold()

    @rule(data=st.data(), killed=st.booleans())
    def leave(self, data: st.DataObject, killed: bool) -> None:
        if len(self.workers) > 1:
            worker = self.workers.pop(data.draw(st.integers(0, len(self.workers) - 1)))
            worker.crash() if killed else worker.counts.close()
            self.old.append(worker)

    @invariant()
    def after_folding_all_see_the_sum(self) -> None:
        for _ in range(2):
            for worker in self.workers:
                worker.fold()
        views = [worker.targets() for worker in self.workers]
        assert [worker.counts.leads for worker in self.workers] == [True] + [False] * (len(self.workers) - 1)
        for worker, view in zip(self.workers, views, strict=True):
            assert worker.counts.workers == len(self.workers)
            for key, target in view.items():
                mine = [lease for lease in worker.leases if lease.target is target]
                assert target.own.active == len(mine)
                polled = views[0].get(key, target)
                assert (target.strangers, target.shared_tokens) == (polled.strangers, polled.shared_tokens)
                if polled.capacity_tokens is not None:  # to a leader that has lost it and met it again it is new
                    assert target.capacity_tokens == polled.capacity_tokens
                everybody = [other[key].own for other in views if key in other]
                assert seen(target) == total([*everybody, polled.strangers])
        assert len(os.listdir(self.directory.name)) == len(self.workers)

    def teardown(self) -> None:
        for worker in self.workers:
            worker.counts.close()
        assert os.listdir(self.directory.name) == []
        for worker in self.workers:
            assert all(target.peers == NOTHING for target in worker.targets().values())
        self.directory.cleanup()


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=40, stateful_step_count=25)


class Process:
    """A real worker."""

    def __init__(self, directory: Path, ranks: int = 2) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(directory), str(ranks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.own = [NOTHING] * ranks

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> None:
        assert self.process.stdout is not None
        self.own = [Load(*load) for load in json.loads(self.process.stdout.readline())]

    def do(self, line: str) -> None:
        self.say(line)
        self.hear()

    def end(self, killed: bool) -> None:
        if killed:
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(60)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Process]]:
    made = [Process(tmp_path) for _ in range(3)]
    yield made
    for process in made:
        process.end(killed=True)


def test_processes_that_end_and_are_killed(tmp_path: Path, processes: list[Process]) -> None:
    """Every sum is exact after each step, while workers are killed, end, and are replaced."""
    rng = random.Random(5)
    here = Worker(tmp_path, ["a"])
    for process in processes:
        process.do("fold")
    for step in range(120):
        process = rng.choice(processes)
        if step % 30 == 29:
            process.end(killed=step != 59)
            processes[processes.index(process)] = process = Process(tmp_path)
            process.do("fold")
        process.do(f"book {rng.randrange(2)} {rng.randrange(10**6)}" if rng.random() < 0.6 else "release")
        here.fold()
        peers = [here.targets()["http://a", rank].peers for rank in range(2)]
        assert peers == [total([process.own[rank] for process in processes]) for rank in range(2)]
        assert here.counts.workers == 4
    assert peers[0].active > 0
    for process in processes:
        process.end(killed=True)
    here.fold()
    assert here.targets()["http://a", 0].peers == NOTHING
    assert [file.name for file in tmp_path.iterdir()] == [here.counts._path.name]
    here.counts.close()


def test_no_half_written_counts_are_read(tmp_path: Path, processes: list[Process]) -> None:
    """While a worker writes as fast as it can, what is read is always some whole state of it."""
    (writer, *_) = processes
    writer.do("fold")
    here = Worker(tmp_path, ["a"])
    writer.say("spin 1000000")
    states = set()
    until = monotonic() + 60
    while len(states) < 50 and monotonic() < until:
        here.fold()
        first, second = (here.targets()["http://a", rank].peers for rank in range(2))
        # Both are booked before it folds, and both released.
        assert first == second
        states.add(first)
    assert len(states) == 50
    here.counts.close()


def test_picks_are_those_of_one_router(tmp_path: Path) -> None:
    """Three workers that fold between requests choose, request by request, what one router would."""
    ids = [str(number) for number in range(8)]
    workers = [Worker(tmp_path, ids) for _ in range(3)]
    alone = Fleet(clock=lambda: 0.0)
    for id in ids:
        alone.add(EngineSpec(f"http://{id}", ranks=2))
    policy, choice = DecodePolicy(slow_start_s=0), random.Random(1)
    leases: list[tuple[Lease, Lease]] = []
    for step in range(400):
        worker = choice.choice(workers)
        for _ in range(2):
            for each in workers:
                each.fold()
        if leases and choice.random() < 0.4:
            for lease in leases.pop(choice.randrange(len(leases))):
                lease.release()
            continue
        work = Work(prompt_tokens=choice.randrange(100_000))
        picks = [policy.pick(work, fleet.targets(D), 99.0, random.Random(step)) for fleet in (worker.fleet, alone)]
        mine, theirs = (pick.target for pick in picks if pick is not None)
        assert (mine.engine.id, mine.rank) == (theirs.engine.id, theirs.rank)
        leases.append((worker.fleet.book(mine, work, D), alone.book(theirs, work, D)))
    for worker in workers:
        worker.counts.close()


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "short.counts").write_bytes(b"x")
    (tmp_path / "other.txt").write_bytes(b"x")
    (tmp_path / "folder.counts").mkdir()
    here, there = Worker(tmp_path, ["a"]), Worker(tmp_path, ["a"])
    here.fold()
    assert here.counts.workers == 2
    junk = tmp_path / "junk.counts"
    junk.write_bytes(os.urandom(SIZE))
    sums = Sums()
    PeerCounts(junk).read(sums)
    assert sums.touched == set()
    for worker in (here, there):
        worker.counts.close()


def test_the_directory_may_go_first(tmp_path: Path) -> None:
    folder = tmp_path / "counts"
    folder.mkdir()
    here, there = Worker(folder, ["a"]), Worker(folder, ["a"])
    here.fold()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with there.fleet.book(there.fleet.targets(D)[0], Work(), D):
        there.fold()
        here.fold()
        assert here.fleet.targets(D)[0].active == 1
    for worker in (here, there):
        worker.counts.close()


def test_an_address_is_part_of_a_targets_name(tmp_path: Path) -> None:
    """What a worker still has at an engine's old address is not counted at its new one."""
    here, there = Worker(tmp_path, []), Worker(tmp_path, [])
    new = here.fleet.add(EngineSpec("http://new", id="e")).targets[0]
    old = there.fleet.add(EngineSpec("http://old", id="e")).targets[0]
    with there.fleet.book(old, Work(), D):
        there.fold()
        here.fold()
        assert new.peers == NOTHING
        there.fleet.add(EngineSpec("http://new", id="e"))
        there.fold()
        here.fold()
        assert new.peers == NOTHING
    for worker in (here, there):
        worker.counts.close()


def test_room_at_a_peer_is_told(tmp_path: Path) -> None:
    here, there = Worker(tmp_path, ["a"]), Worker(tmp_path, ["a"])
    lease = there.fleet.book(there.fleet.targets(D)[0], Work(), D)
    there.fold()
    here.fold()
    calls: list[int] = []
    here.fleet.on_room = lambda: calls.append(here.fleet.targets(D)[0].active)
    here.fold()
    assert calls == []
    lease.release()
    there.fold()
    here.fold()
    assert calls == [0]
    for worker in (here, there):
        worker.counts.close()
