"""Identities: one holder at a time, adopted when it is dead, given up when another has adopted them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_kvstore import writer as module
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.writer import MAX_LEASE_BYTES, Claims, Holder, Writer

NAMESPACE = bytes(range(32))
LEASE_S = 30.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def directories(tmp_path: Path) -> None:
    (tmp_path / "writers").mkdir()
    (tmp_path / "journals").mkdir()


def claims(tmp_path: Path, clock: Clock, *, shared: bool = False, slab_slots: int = 16) -> Claims:
    return Claims(
        [tmp_path / "writers"], [tmp_path / "journals"], NAMESPACE, Geometry(8192, slab_slots),
        lease_s=LEASE_S, shared=shared, clock=clock,
    )  # fmt: skip


def lease(tmp_path: Path, writer: Writer) -> Path:
    return tmp_path / "writers" / f"{writer.id:08x}.lease"


def age(tmp_path: Path, writer: Writer, seconds: float) -> None:
    """Let the last sign of life be so long ago, by the file system's clock."""
    path = lease(tmp_path, writer)
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize("shared", [False, True])
def test_two_processes_have_two_identities(tmp_path: Path, clock: Clock, shared: bool) -> None:
    first, second = (claims(tmp_path, clock, shared=shared).claim() for _ in range(2))
    assert first.id != second.id and (first.epoch, second.epoch) == (1, 1)
    assert first.held() and second.held()
    assert {str(first.journal.name), str(second.journal.name)} == set(os.listdir(tmp_path / "journals"))


@pytest.mark.parametrize("shared", [False, True])
def test_who_released_is_followed_at_once_in_a_later_epoch(tmp_path: Path, clock: Clock, shared: bool) -> None:
    first = claims(tmp_path, clock, shared=shared).claim()
    first.release()
    first.release()
    second = claims(tmp_path, clock, shared=shared).claim()
    assert (second.id, second.epoch) == (first.id, 2)
    assert os.listdir(tmp_path / "journals") == [str(second.journal.name)]  # the first had nothing to say


def test_the_next_epoch_is_behind_every_journal_and_lease(tmp_path: Path, clock: Clock) -> None:
    first = claims(tmp_path, clock).claim()
    first.release()
    (tmp_path / "journals" / f"{first.id:08x}.00000009-0003.log").touch()
    (tmp_path / "journals" / "ffffffff.000000ff.log").touch()
    (tmp_path / "journals" / "notes").touch()
    assert claims(tmp_path, clock).claim().epoch == 10


def test_a_killed_process_is_followed_at_once_on_a_local_disk(root: Path, tmp_path: Path, clock: Clock) -> None:
    code = f"""
import sys, time
sys.path.insert(0, {str(root / "tests" / "kvstore")!r})
from pathlib import Path
import test_writer as t
writer = t.claims(Path({str(tmp_path)!r}), t.Clock()).claim()
print(writer.id, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    identity = int(process.stdout.readline())
    living = claims(tmp_path, clock).claim()
    assert living.id != identity
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    adopted = claims(tmp_path, clock).claim()
    assert (adopted.id, adopted.epoch) == (identity, 2)


def drop_lock(writer: Writer) -> None:
    """What another machine sees: no lock, whether its holder lives or not."""
    for path, file in writer._lease._files.items():
        os.close(file)
        writer._lease._files[path] = os.open(path, os.O_RDWR)


def test_on_shared_storage_only_silence_proves_death(tmp_path: Path, clock: Clock) -> None:
    first = claims(tmp_path, clock, shared=True).claim()
    drop_lock(first)
    second = claims(tmp_path, clock, shared=True).claim()
    assert second.id != first.id
    drop_lock(second)
    age(tmp_path, first, LEASE_S + 1)
    third = claims(tmp_path, clock, shared=True).claim()
    assert (third.id, third.epoch) == (first.id, 2)


def test_a_clock_of_this_machine_that_jumps_declares_nobody_dead(tmp_path: Path, clock: Clock) -> None:
    first = claims(tmp_path, clock, shared=True).claim()
    drop_lock(first)
    for now in (1e9, -1e9, 0.0):
        clock.now = now
        assert claims(tmp_path, clock, shared=True).claim().id != first.id


def test_of_two_who_see_the_same_silence_one_wins(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are past all checks when the first creates the journal of the next epoch."""
    first = claims(tmp_path, clock, shared=True).claim()
    drop_lock(first)
    age(tmp_path, first, LEASE_S + 1)
    monkeypatch.setattr(module.fcntl, "flock", lambda file, how: None)
    winners: list[Writer] = []
    real = Claims._last_epoch

    def slow(self: Claims, holder: Holder) -> int:
        epoch = real(self, holder)
        if not winners:
            winners.append(first)  # so that the inner claim does not wait for another
            winners[0] = claims(tmp_path, clock, shared=True).claim()
        return epoch

    monkeypatch.setattr(Claims, "_last_epoch", slow)
    loser = claims(tmp_path, clock, shared=True).claim()
    assert (winners[0].id, winners[0].epoch) == (first.id, 2)
    assert loser.id != first.id


def test_a_writer_that_slept_finds_out_before_it_writes(tmp_path: Path, clock: Clock) -> None:
    first = claims(tmp_path, clock, shared=True).claim()
    drop_lock(first)
    age(tmp_path, first, LEASE_S + 1)
    second = claims(tmp_path, clock, shared=True).claim()
    assert second.id == first.id
    clock.now += LEASE_S
    assert not first.held() and second.held()
    first.release()
    assert second.held() and Holder.read(lease(tmp_path, second)) == second._holder


def test_signs_of_life_keep_an_identity(tmp_path: Path, clock: Clock) -> None:
    first = claims(tmp_path, clock, shared=True).claim()
    drop_lock(first)
    for _ in range(5):
        age(tmp_path, first, LEASE_S + 1)
        clock.now += LEASE_S / 4
        first.beat()
        assert claims(tmp_path, clock, shared=True).claim().id != first.id
    assert first.held()


def test_a_lease_that_was_removed_is_lost(tmp_path: Path, clock: Clock) -> None:
    first = claims(tmp_path, clock).claim()
    lease(tmp_path, first).unlink()
    clock.now += LEASE_S
    assert not first.held()
    first.release()


def test_who_cannot_show_signs_of_life_gives_up_in_time(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = claims(tmp_path, clock, shared=True).claim()

    def broken(*_: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(module.os, "utime", broken)
    clock.now += LEASE_S / 2
    assert first.held(), "it may be back in time"
    clock.now += LEASE_S / 2
    assert not first.held()


def test_slabs_of_another_length_are_adopted_only_on_demand(tmp_path: Path, clock: Clock) -> None:
    first = claims(tmp_path, clock, slab_slots=4).claim()
    first.release()
    assert claims(tmp_path, clock).adopt() is None
    adopted = claims(tmp_path, clock).adopt(of_any_length=True)
    assert adopted is not None and (adopted.id, adopted.epoch, adopted.slab_slots) == (first.id, 2, 4)
    adopted.release()
    again = claims(tmp_path, clock, slab_slots=4).claim()
    assert (again.id, again.epoch) == (first.id, 3), "it keeps the length that its slabs have"


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"{}", b'{"writer": 1}', b"\xff\xfe", b"x" * (MAX_LEASE_BYTES * 2), b"[" * MAX_LEASE_BYTES],
)
def test_a_lease_that_is_none_is_left_alone(tmp_path: Path, clock: Clock, text: bytes) -> None:
    path = tmp_path / "writers" / "00000007.lease"
    path.write_bytes(text)
    assert claims(tmp_path, clock).claim().id != 7
    assert path.read_bytes() == text


def test_leases_with_impossible_numbers_are_left_alone(tmp_path: Path, clock: Clock) -> None:
    first = claims(tmp_path, clock).claim()
    first.release()
    path = lease(tmp_path, first)
    good = path.read_text()
    others = (good.replace('"epoch": 1', f'"epoch": {epoch}') for epoch in (-1, (1 << 32) - 1, 1 << 32, '"1"'))
    for wrong in (*others, good.replace(f'"writer": {first.id}', f'"writer": {first.id ^ 1}')):
        assert wrong != good
        path.write_text(wrong)
        assert claims(tmp_path, clock).adopt() is None
    path.write_text(good)
    (tmp_path / "journals" / f"{first.id:08x}.ffffffff.log").touch()
    assert claims(tmp_path, clock).adopt() is None, "there is no epoch behind the last one"
