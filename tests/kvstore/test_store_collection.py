"""A store that collects: what stays, what is given back, and what others see."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from deepinfer_kvstore.fill import Disk
from deepinfer_kvstore.gc_lease import GcLease
from deepinfer_kvstore.retention import Retention
from deepinfer_kvstore.store import Put, Store
from store_case import PAYLOAD, SLAB_SLOTS, SLOT, get, key, open_store, payload, put

SLAB = SLAB_SLOTS * SLOT


def eventually(said: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = monotonic() + seconds
    while not said():
        if monotonic() > deadline:
            return False
        sleep(0.02)
    return True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path, slabs=8, collect_interval_s=0.02, io_timeout_s=0.2, touch_interval_s=0.05)
    yield opened
    opened.close()


def put_chain(store: Store, numbers: range) -> list[bool]:
    """Store the blocks as one chain."""
    puts = [
        Put(key(n), memoryview(payload(n)), key(n - 1)[2:10] if n > numbers.start else bytes(8), 64 * (at + 1))
        for at, n in enumerate(numbers)
    ]
    transfer = store.put(puts, timeout_s=60)
    assert transfer.wait(60)
    return transfer.results()


def slab_bytes(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "root").glob("*/slabs/*.slab"))


def test_ten_times_its_capacity_goes_through_and_the_disk_holds_the_high_mark_and_one_slab(
    tmp_path: Path, store: Store
) -> None:
    """Tanguille/cluster#4636: a cache without bounds takes its node with it."""
    stored = most = first = 0
    deadline = monotonic() + 120
    while stored <= 10 * SLAB_SLOTS or first < 80 * SLAB_SLOTS:
        assert monotonic() < deadline
        results = put_chain(store, range(first, first + 4))
        first += 4
        stored += sum(results)
        most = max(most, slab_bytes(tmp_path))
        if not all(results):
            sleep(0.05)
    assert most <= 0.85 * 8 * SLAB + SLAB
    assert store.stats().evicted["space"] >= stored - 8 * SLAB_SLOTS
    assert store.stats().used_bytes <= 0.95 * 8 * SLAB + 4 * SLOT


def test_a_chain_longer_than_the_store_keeps_its_beginning(store: Store) -> None:
    for first in range(0, 7 * SLAB_SLOTS, SLAB_SLOTS):
        put(store, range(first, first + SLAB_SLOTS))
    numbers = range(1000, 1000 + 3 * SLAB_SLOTS)
    assert eventually(lambda: all(put_chain(store, numbers)) or store.longest_prefix([key(n) for n in numbers]) > 20)
    for _ in range(20):
        found = store.contains([key(n) for n in numbers])
        assert found == sorted(found, reverse=True)
        put(store, range(2000, 2004))
        sleep(0.02)


def test_empty_slabs_are_given_back_but_for_one(tmp_path: Path, store: Store) -> None:
    numbers = range(5 * SLAB_SLOTS)
    put(store, numbers)
    assert slab_bytes(tmp_path) == 5 * SLAB
    store.delete([key(n) for n in numbers])
    assert eventually(lambda: slab_bytes(tmp_path) == SLAB)
    assert put(store, range(500, 500 + 2 * SLAB_SLOTS)) == [True] * 2 * SLAB_SLOTS
    assert get(store, [500, 520]) == [payload(500), payload(520)]


def test_slabs_that_come_and_go_leave_nothing_behind(tmp_path: Path, store: Store) -> None:
    """What is known of deleted slots is kept until they are written again: of numbers used once, for ever."""
    other = open_store(tmp_path, index_dir=tmp_path / "other", collect_interval_s=None)
    for start in range(0, 1000, 100):
        numbers = range(start, start + 3 * SLAB_SLOTS)
        assert put(store, numbers) == [True] * len(numbers)
        assert other.sync(60)
        assert get(other, numbers) == [payload(n) for n in numbers]
        store.delete([key(n) for n in numbers])
        assert eventually(lambda: slab_bytes(tmp_path) == SLAB)
    known = store.index.slabs()
    assert len({slab for _, slab in known}) <= 4 and len(known) <= 4 + 1  # the other's own
    assert {other.stats().misses[reason] for reason in other.stats().misses} == set()
    other.close()


def test_pins_hold_in_another_process_that_collects(tmp_path: Path) -> None:
    """LMCache#1690: looked up, then evicted, then read."""
    reader = open_store(tmp_path, slabs=8, index_dir=tmp_path / "other")
    numbers = range(10)
    assert all(put_chain(reader, numbers))
    reader.pin([key(9)], 300)
    assert reader.sync(60)
    collects = open_store(tmp_path, slabs=8, collect_interval_s=0.02, io_timeout_s=0.2)
    first = 100
    while collects.stats().evicted.get("space", 0) < 3 * SLAB_SLOTS:
        put(collects, range(first, first + 4))
        first += 4
        sleep(0.02)
    assert reader.sync(60)
    assert get(reader, numbers) == [payload(n) for n in numbers]
    reader.close()
    collects.close()


def test_classes_that_are_not_configured_get_the_default_and_are_counted(store: Store) -> None:
    put(store, [1], ttl_class="agents")
    put(store, [2], ttl_class="chat")
    put(store, [3])
    entries = store.index.get_many([key(1), key(2), key(3)])
    numbers = store.options.retention.numbers
    assert [entry and entry.ttl_class for entry in entries] == [numbers["agent"], numbers["chat"], numbers["agent"]]
    assert store.stats().unknown_classes == 1


def test_expired_blocks_are_counted_as_such(tmp_path: Path) -> None:
    brief = Retention(ttl={"brief": 1}, expired_per_hour=10_000)
    store = open_store(tmp_path, collect_interval_s=0.02, retention=brief)
    put(store, range(4), ttl_class="brief")
    put(store, range(4, 6))
    gc = store._gc
    assert gc is not None

    def collected() -> bool:
        gc._collector._scan_at = 0.0  # it looks for expired blocks once a minute
        return store.stats().evicted == {"expired": 4}

    assert eventually(collected)
    assert store.contains([key(n) for n in range(6)]) == [False] * 4 + [True] * 2
    assert store.stats().bytes_stored == 6 * PAYLOAD
    store.close()


def test_of_two_stores_one_collects_and_the_other_goes_on_when_it_is_closed(tmp_path: Path) -> None:
    first = open_store(tmp_path, slabs=8, collect_interval_s=0.02, io_timeout_s=0.2, lease_s=60)
    put(first, [1])
    assert eventually(lambda: bool(list((tmp_path / "root").glob("*/gc.lease"))))
    second = open_store(tmp_path, slabs=8, collect_interval_s=0.02, io_timeout_s=0.2, lease_s=60)
    put(second, [2])
    put(first, range(100, 100 + 8 * SLAB_SLOTS))
    assert eventually(lambda: first.stats().evicted.get("space", 0) > 0)
    assert second.stats().evicted == {}
    first.close()
    assert eventually(lambda: second._gc is not None and second._gc._collector._lease.held())
    second.close()
    assert not list((tmp_path / "root").glob("*/gc.lease"))


def test_slabs_are_looked_after_while_nothing_can_be_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk free slots give back the room that a journal lacks."""

    def full(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(GcLease, "hold", full)
    store = open_store(tmp_path, collect_interval_s=0.02, io_timeout_s=0.2)
    put(store, range(3 * SLAB_SLOTS))
    store.delete([key(n) for n in range(3 * SLAB_SLOTS)])
    assert eventually(lambda: slab_bytes(tmp_path) == SLAB)
    store.close()


def test_an_error_of_the_program_does_not_end_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, collect_interval_s=0.02, io_timeout_s=0.2)
    with monkeypatch.context() as wrong:
        wrong.setattr(GcLease, "hold", lambda _: 1 / 0)
        assert eventually(lambda: caplog.text.count("collection ended in an error of the program") > 1)
    put(store, range(4 * SLAB_SLOTS))
    assert eventually(lambda: store.stats().evicted.get("space", 0) > 0)
    store.close()


def test_a_writer_without_a_free_slot_makes_room_though_another_holds_most_slabs(tmp_path: Path) -> None:
    rich = open_store(tmp_path, slabs=8, io_timeout_s=0.2)
    put(rich, range(6 * SLAB_SLOTS))
    rich.delete([key(n) for n in range(0, 6 * SLAB_SLOTS, 2)])  # half of each slab is free, and stays
    assert rich.sync(60)
    poor = open_store(tmp_path, slabs=8, collect_interval_s=0.02, io_timeout_s=0.2)
    stored, number = 0, 1000
    deadline = monotonic() + 60
    while stored < 5 * SLAB_SLOTS:
        assert monotonic() < deadline
        stored += sum(put(poor, range(number, number + 2)))
        number += 2
        sleep(0.02)
    assert len(list((tmp_path / "root").glob(f"*/slabs/{poor.writer:08x}-*.slab"))) >= 1
    assert slab_bytes(tmp_path) <= 8 * SLAB
    rich.close()
    poor.close()


def holes(tmp_path: Path) -> int:
    """Slots whose storage was given back."""
    slabs = list((tmp_path / "root").glob("*/slabs/*.slab"))
    return len(slabs) * SLAB_SLOTS - sum(path.stat().st_blocks * 512 for path in slabs) // SLOT


def test_punched_slots_give_their_storage_back_and_are_written_again(tmp_path: Path) -> None:
    store = open_store(
        tmp_path, slabs=2, collect_interval_s=0.02, io_timeout_s=0.1, retention=Retention(reclaim="punch")
    )
    put(store, range(24))
    assert holes(tmp_path) == 0
    store.delete([key(n) for n in range(0, 24, 3)])
    assert eventually(lambda: holes(tmp_path) == 8)
    assert get(store, range(24)) == [None if n % 3 == 0 else payload(n) for n in range(24)]
    assert put(store, range(100, 108)) == [True] * 8
    assert get(store, range(100, 108)) == [payload(n) for n in range(100, 108)]
    store.close()


def test_a_reader_during_a_punch_gets_the_block_or_a_miss(tmp_path: Path) -> None:
    """A reader on another node may have looked a block up before it was collected: it rests, and then it is a hole."""
    store = open_store(
        tmp_path, slabs=2, collect_interval_s=0.02, io_timeout_s=0.02, retention=Retention(reclaim="punch")
    )
    put(store, range(16))
    late = open_store(tmp_path, index_dir=tmp_path / "late", sync_interval_s=3600)
    store.delete([key(n) for n in range(16)])
    seen: set[bool] = set()
    deadline = monotonic() + 30
    while False not in seen and monotonic() < deadline:
        for found, n in zip(get(late, range(16)), range(16), strict=True):
            assert found in (None, payload(n))
            seen.add(found is not None)
    assert False in seen
    assert set(late.stats().misses) <= {"header", "absent", "generation"}
    store.close()
    late.close()


def test_a_disk_that_others_fill_gets_the_storage_of_free_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """# Tanguille/cluster#4636"""
    store = open_store(tmp_path, slabs=4, collect_interval_s=0.02, io_timeout_s=0.1)
    put(store, range(40))
    full = Disk(total_bytes=1000 * SLOT, used_bytes=999 * SLOT, own_bytes=48 * SLOT)
    monkeypatch.setattr(store._disks, "fullest", lambda: full)
    assert eventually(lambda: store.stats().used_bytes == 0)  # others alone are above the hard mark
    assert eventually(lambda: slab_bytes(tmp_path) == SLAB and holes(tmp_path) == SLAB_SLOTS)
    store.close()


def test_slabs_that_a_dead_writer_left_empty_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_kvstore.upkeep.SWEEP_SECONDS", 0.1)
    store = open_store(tmp_path, slabs=8, collect_interval_s=0.02)
    dead, lives = open_store(tmp_path, slabs=8), open_store(tmp_path, slabs=8)
    put(dead, range(2 * SLAB_SLOTS))
    put(lives, range(200, 200 + SLAB_SLOTS))
    dead.delete([key(n) for n in range(SLAB_SLOTS)])
    lives.delete([key(n) for n in range(200, 200 + SLAB_SLOTS)])
    assert lives.sync(60)
    dead.close()
    assert eventually(lambda: slab_bytes(tmp_path) == 2 * SLAB)
    assert store.sync(60)
    assert get(store, range(16, 32)) == [payload(n) for n in range(16, 32)]
    assert put(lives, [300]) == [True], "its slab is still there"
    lives.close()
    store.close()


@pytest.mark.parametrize("damage", ["removed", "emptied", "noise"])
def test_slabs_whose_lease_is_gone_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """Else each lease that somebody removes costs the store its slabs' capacity for ever."""
    monkeypatch.setattr("deepinfer_kvstore.upkeep.SWEEP_SECONDS", 0.1)
    victim = open_store(tmp_path, slabs=4, lease_s=0.5, collect_interval_s=0.02, io_timeout_s=0.2)
    put(victim, range(3 * SLAB_SLOTS))
    before = victim.writer
    (lease,) = (tmp_path / "root").glob("*/writers/*.lease")
    if damage == "removed":
        lease.unlink()
    else:
        lease.write_bytes(b"" if damage == "emptied" else b"\xff" * 512)
    assert eventually(lambda: victim.writer != before)
    assert [get(victim, [n]) == [payload(n)] for n in range(3 * SLAB_SLOTS)] == [True] * 3 * SLAB_SLOTS
    victim.delete([key(n) for n in range(3 * SLAB_SLOTS)])
    stored, number, deadline = 0, 1000, monotonic() + 60
    while stored < 3 * SLAB_SLOTS:  # more than the fourth slab, which alone would be left
        assert monotonic() < deadline
        stored += sum(put(victim, range(number, number + 8)))
        number += 8
        sleep(0.02)
    kept = [n for n in range(1000, number) if victim.contains([key(n)])[0]]
    assert len(kept) > SLAB_SLOTS and get(victim, kept) == [payload(n) for n in kept]
    victim.close()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_slab_that_somebody_removes_is_forgotten_and_storing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    """Else an open file takes blocks that no other process can read, or puts fail until the store is reopened."""
    monkeypatch.setattr("deepinfer_kvstore.upkeep.SWEEP_SECONDS", 0.1)
    store = open_store(tmp_path, slabs=4, collect_interval_s=0.02 if is_open else None)
    put(store, range(8))
    (slab,) = (tmp_path / "root").glob("*/slabs/*.slab")
    slab.unlink()
    if is_open:
        assert eventually(lambda: store._held().slots.slabs() == [])
    else:
        store._slabs.forget(slab.name)
        assert put(store, [8]) == [False]
        assert store.stats().dropped == {"error": 1}
    assert put(store, range(10, 20)) == [True] * 10
    other = open_store(tmp_path, index_dir=tmp_path / "other")
    assert get(other, range(20)) == [None] * 10 + [payload(n) for n in range(10, 20)]
    assert put(other, range(8)) == [True] * 8, "they are no longer said to be there"
    assert get(other, range(8)) == [payload(n) for n in range(8)]
    store.close()
    other.close()


def test_trouble_of_the_root_is_said_once_and_collection_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, slabs=8, collect_interval_s=0.01, io_timeout_s=0.2)
    put(store, range(7 * SLAB_SLOTS))
    gone = tmp_path / "away"
    tries = 0

    def hold() -> bool:
        nonlocal tries
        tries += 1
        os.listdir(gone)  # as the lease's own look at a directory that is away
        return True

    with monkeypatch.context() as patched:
        patched.setattr(store._gc._collector._lease, "hold", hold)  # type: ignore[union-attr]
        assert eventually(lambda: tries > 5)
    assert [str(gone) in record.getMessage() for record in caplog.records if "collection" in record.getMessage()] == [
        True
    ]
    assert eventually(lambda: store.stats().evicted.get("space", 0) > 0)
    store.close()
