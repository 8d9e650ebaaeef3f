"""Disks that fail, lie, fill up and stand still: exact bytes or a miss, never an exception, never unbounded memory."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from threading import Event
from time import monotonic, sleep

import pytest

from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.header import PACKED_BYTES
from deepinfer_kvstore.posix import PosixBackend
from deepinfer_kvstore.slabs import slab_name
from deepinfer_kvstore.store import Put
from faulty_backend import FaultyBackend
from store_case import PAYLOAD, SLAB_SLOTS, SLOT, aligned, descriptor, get, key, open_store, payload, put

IDENTITY_BYTES = 106
"""Of a header: up to the checksum of the payload."""
GEOMETRY = Geometry(SLOT, SLAB_SLOTS)


@pytest.fixture
def disk(tmp_path: Path) -> FaultyBackend:
    """A disk for `open_store(tmp_path)`."""
    slabs = tmp_path / "root" / descriptor().directory / "slabs"
    slabs.mkdir(parents=True)
    return FaultyBackend(PosixBackend(slabs, GEOMETRY))


def fails(*calls: str, number: int = errno.EIO) -> Callable[[str, str, int], None]:
    def fault(call: str, slab: str, slot: int) -> None:
        if call in calls:
            raise OSError(number, os.strerror(number), slab)

    return fault


def eventually(what: Callable[[], bool]) -> None:
    deadline = monotonic() + 30
    while not what():
        assert monotonic() < deadline
        sleep(0.01)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("call", ["create", "open", "names", "free_bytes", "readv", "writev"])
def test_an_error_of_any_call_is_a_miss_or_a_drop(tmp_path: Path, disk: FaultyBackend, call: str, number: int) -> None:
    """# llm-d-kv-cache#514, vllm#52234"""
    store = open_store(tmp_path, backend=disk, breaker_failures=1000)
    assert put(store, range(4)) == [True] * 4
    disk.before = fails(call, number=number)
    store._slabs.close()  # what is open stays readable otherwise
    loaded = get(store, range(4))
    stored = put(store, range(10, 10 + 2 * SLAB_SLOTS))
    assert loaded == ([None] * 4 if call in ("open", "readv") else [payload(n) for n in range(4)])
    expected = {"open": 0, "writev": 0, "readv": 2 * SLAB_SLOTS}.get(call, SLAB_SLOTS - 4)
    assert sum(stored) == expected and stored == sorted(stored, reverse=True)
    reasons = store.stats()
    assert sum(reasons.misses.values()) == loaded.count(None)
    assert sum(reasons.dropped.values()) == stored.count(False)
    disk.before = fails()
    numbers = [n for n, ok in zip(range(10, 10 + 2 * SLAB_SLOTS), stored, strict=True) if ok]
    assert get(store, numbers) == [payload(n) for n in numbers]
    eventually(lambda: put(store, [99]) == [True])
    assert get(store, [99]) == [payload(99)]
    store.close()


def test_one_bad_sector_is_one_miss(tmp_path: Path, disk: FaultyBackend) -> None:
    store = open_store(tmp_path, backend=disk)
    put(store, range(8))

    def bad_slot_3(call: str, slab: str, slot: int) -> None:
        many = len([c for c in disk.calls if c[0] == "readv"]) == 1
        if call == "readv" and (many or slot == 3):
            raise OSError(errno.EIO, "bad sector")

    disk.before = bad_slot_3
    assert get(store, range(8)) == [payload(n) if n != 3 else None for n in range(8)]
    assert store.stats().misses == {"error": 1}
    store.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_what_could_not_be_read_is_not_promised_again_until_it_is_stored_again(
    tmp_path: Path, disk: FaultyBackend, number: int
) -> None:
    """An engine that is promised the block at every step would try for ever. # vllm#49176, LMCache#1690"""
    store = open_store(tmp_path, backend=disk)
    put(store, range(4))
    disk.before = fails("readv", number=number)
    assert get(store, [2]) == [None]
    keys = [key(n) for n in range(4)]
    assert store.contains(keys) == [True, True, False, True] and store.longest_prefix(keys) == 2
    store.sync(30)
    # What cannot be read is lost. What could not be reached is still there.
    assert store.index.contains(keys) == [True, True, number != errno.EIO, True]
    disk.before = fails()
    assert put(store, [2]) == [True]
    assert store.contains(keys) == [True] * 4 and get(store, range(4)) == [payload(n) for n in range(4)]
    store.close()


def test_a_disk_that_cannot_be_read_at_all_loses_few_blocks(tmp_path: Path, disk: FaultyBackend) -> None:
    store = open_store(tmp_path, backend=disk, breaker_failures=5, breaker_pause_s=60)
    put(store, range(SLAB_SLOTS))
    disk.before = fails("readv")
    assert get(store, range(SLAB_SLOTS)) == [None] * SLAB_SLOTS
    store.sync(30)
    assert store.index.contains([key(n) for n in range(SLAB_SLOTS)]).count(False) == 4
    store.close()


def slab_of(tmp_path: Path) -> Path:
    (slab,) = (tmp_path / "root").glob("*/slabs/*.slab")
    return slab


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_bits_flipped_anywhere_in_a_slot_are_a_miss_of_that_block_alone(tmp_path: Path, direct: str) -> None:
    """Every second slot has one bit flipped, each at another byte."""
    chance = random.Random(5)
    header = SLOT - 512
    places = [*range(header, header + PACKED_BYTES), *chance.sample(range(PAYLOAD), 40), PAYLOAD - 1, 0]
    numbers = range(2 * len(places))
    store = open_store(tmp_path, slabs=32, direct=direct, collect_interval_s=None)
    assert put(store, numbers) == [True] * len(numbers)
    locations = [entry.location for entry in store.index.get_many([key(n) for n in numbers]) if entry]
    store.close()
    slabs = tmp_path / "root" / descriptor().directory / "slabs"
    for number, byte in enumerate(places):
        where = locations[2 * number]
        with (slabs / slab_name(where.writer, where.slab)).open("r+b") as file:
            file.seek(where.slot * SLOT + byte)
            (old,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([old ^ 1 << chance.randrange(8)]))
    store = open_store(tmp_path, direct=direct, read_only=True)
    found = get(store, numbers)
    assert found[1::2] == [payload(n) for n in numbers[1::2]]
    for number, byte in enumerate(places):
        # Fields that say nothing of the payload, and the CRC that protects them, do not make it wrong.
        beside = byte >= header + IDENTITY_BYTES
        assert found[2 * number] == (payload(2 * number) if beside else None), byte
    store.close()


def test_a_block_that_is_damaged_is_removed_for_everybody_and_can_be_stored_again(tmp_path: Path) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path, index_dir=tmp_path / "other")
    put(store, range(3))
    with slab_of(tmp_path).open("r+b") as file:
        file.seek(SLOT + 17)
        file.write(b"\0\0\0\0")
    store._slabs.close()
    assert get(store, range(3)) == [payload(0), None, payload(2)]
    assert store.stats().misses == {"checksum": 1}
    assert store.sync(60)
    assert other.sync(60)
    assert other.contains([key(n) for n in range(3)]) == [True, False, True]
    assert put(store, [1]) == [True] and get(store, [1]) == [payload(1)]
    store.close()
    other.close()


def test_a_slab_of_zeros_is_no_hit_and_a_block_of_zeros_is_one(tmp_path: Path) -> None:
    """# local-inference-lab/vllm#217"""
    store = open_store(tmp_path)
    assert put(store, [1, 2], lambda n: bytes(PAYLOAD)) == [True, True]
    assert put(store, [3]) == [True]
    assert get(store, [1, 2, 3]) == [bytes(PAYLOAD), bytes(PAYLOAD), payload(3)]
    slab_of(tmp_path).write_bytes(bytes(GEOMETRY.slab_bytes))
    store._slabs.close()
    assert get(store, [1, 2, 3]) == [None] * 3
    assert store.stats().misses == {"header": 3}
    store.close()


def test_a_reader_that_comes_late_misses_and_never_reads_the_slots_next_block(
    tmp_path: Path, disk: FaultyBackend
) -> None:
    """The slot is reused between the look-up and the read. # Mooncake#4153"""
    writer = open_store(tmp_path, slabs=1, io_timeout_s=0.05)
    put(writer, range(SLAB_SLOTS))
    reader = open_store(tmp_path, index_dir=tmp_path / "reader", backend=disk, read_only=True)
    reused = Event()
    disk.before = lambda call, slab, slot: reused.wait(30) and None if call == "readv" else None
    buffers = [aligned(PAYLOAD) for _ in range(SLAB_SLOTS)]
    late = reader.get([key(n) for n in range(SLAB_SLOTS)], buffers)
    writer.delete([key(n) for n in range(SLAB_SLOTS)])
    eventually(lambda: put(writer, range(100, 100 + SLAB_SLOTS)) == [True] * SLAB_SLOTS)
    reused.set()
    assert late.wait(30) and late.results() == [False] * SLAB_SLOTS
    assert reader.stats().misses == {"generation": SLAB_SLOTS}
    assert reader.sync(60)
    assert get(reader, range(100, 104)) == [payload(n) for n in range(100, 104)]
    reader.close()
    writer.close()


def test_a_slab_that_somebody_removed_is_a_miss(tmp_path: Path) -> None:
    """# Mooncake#935"""
    store = open_store(tmp_path)
    put(store, range(3))
    slab_of(tmp_path).unlink()
    store._slabs.close()
    assert get(store, range(3)) == [None] * 3
    assert store.stats().misses == {"absent": 3}
    assert store.sync(60)
    assert store.contains([key(0)]) == [False]
    store.close()


def test_only_who_knows_the_secret_is_believed(tmp_path: Path) -> None:
    poisoner = open_store(tmp_path)
    put(poisoner, [1])
    poisoner.close()
    store = open_store(tmp_path, secret=b"s" * 32)
    put(store, [2])
    assert get(store, [1, 2]) == [None, payload(2)]
    assert store.stats().misses == {"mac": 1}
    store.close()


def test_a_slow_disk_keeps_memory_flat_and_loads_alive(tmp_path: Path, disk: FaultyBackend) -> None:
    """# llm-d-kv-cache#457, #616"""
    store = open_store(tmp_path, backend=disk, max_inflight_bytes=10 * PAYLOAD, run_bytes=SLOT, io_threads=4)
    put(store, range(4))
    slow = Event()
    disk.before = lambda call, slab, slot: slow.wait(30) and None if call == "writev" else None
    transfers = []
    for number in range(100, 200):
        transfers.append(store.put([Put(key(number), memoryview(payload(number)), bytes(8), 64)]))
        assert store.stats().inflight_bytes <= 10 * PAYLOAD
    assert [transfer.done() for transfer in transfers].count(False) == 10, "more were dropped at once"
    assert store.stats().dropped == {"queue": 90}
    assert get(store, range(4)) == [payload(n) for n in range(4)], "writes leave threads to reads"
    slow.set()
    assert all(transfer.wait(30) for transfer in transfers)
    assert [transfer.results() for transfer in transfers].count([True]) == 10
    assert store.stats().inflight_bytes == 0
    store.close()


def test_from_the_first_dropped_block_on_all_of_a_put_are_dropped(tmp_path: Path, disk: FaultyBackend) -> None:
    store = open_store(tmp_path, backend=disk, max_inflight_bytes=3 * PAYLOAD)
    assert put(store, range(6)) == [True] * 3 + [False] * 3
    store.close()


def test_what_waits_too_long_is_a_miss_and_its_thread_is_not_waited_for(tmp_path: Path, disk: FaultyBackend) -> None:
    store = open_store(tmp_path, backend=disk, io_threads=1, breaker_failures=1000)
    put(store, range(2))
    stuck = Event()
    disk.before = lambda call, slab, slot: stuck.wait(30) and None if call == "readv" else None
    buffers = [aligned(PAYLOAD), aligned(PAYLOAD)]
    running = store.get([key(0)], buffers[:1], timeout_s=60)
    eventually(lambda: disk.calls[-1][0] == "readv")
    queued = store.get([key(1)], buffers[1:], timeout_s=0.1)
    assert queued.wait(30) and queued.results() == [False]
    assert store.stats().misses == {"timeout": 1}
    running.deadline = 0.0
    assert running.overdue()
    assert not running.done(), "its buffer is still the store's"
    stuck.set()
    assert running.wait(30) and running.results() == [True] and bytes(buffers[0]) == payload(0)
    store.close()


def test_a_disk_that_stands_still_opens_the_breaker_and_one_that_answers_closes_it(
    tmp_path: Path, disk: FaultyBackend
) -> None:
    store = open_store(tmp_path, backend=disk, io_threads=2, breaker_failures=2, breaker_pause_s=0.2)
    put(store, range(3))
    stuck = Event()
    disk.before = lambda call, slab, slot: stuck.wait(30) and None if call == "readv" else None
    waiting = [store.get([key(n)], [aligned(PAYLOAD)], timeout_s=60) for n in range(2)]
    eventually(lambda: [call for call, _, _ in disk.calls].count("readv") == 2)
    with store._threads._lock:  # their deadlines pass now that both are at it
        for job in store._threads._running:
            job.deadline = 0.0
        store._threads._alarm.notify()
    eventually(lambda: store.contains([key(2)]) == [False])
    at_once = store.get([key(2)], [aligned(PAYLOAD)])
    assert at_once.done() and at_once.results() == [False]
    assert store.longest_prefix([key(2)]) == 0
    stuck.set()
    assert all(transfer.wait(30) for transfer in waiting)
    eventually(lambda: get(store, [2]) == [payload(2)])
    assert store.contains([key(2)]) == [True]
    assert store.stats().misses["breaker"] >= 1
    store.close()


def test_repeated_errors_open_the_breaker_of_their_direction_alone(tmp_path: Path, disk: FaultyBackend) -> None:
    store = open_store(tmp_path, backend=disk, breaker_failures=3, breaker_pause_s=60.0)
    put(store, range(3))
    disk.before = fails("writev", number=errno.ENOSPC)
    for number in range(10, 16):
        assert put(store, [number]) == [False]
    assert store.stats().dropped == {"error": 3, "breaker": 3}
    assert get(store, range(3)) == [payload(n) for n in range(3)]
    disk.before = fails("readv")
    for number in range(3):
        assert get(store, [number]) == [None]
    calls = len(disk.calls)
    assert get(store, [0, 1]) == [None, None] and len(disk.calls) == calls, "nothing is asked any more"
    assert store.stats().misses == {"error": 3, "breaker": 2}
    store.close()


def test_a_journal_that_cannot_be_written_makes_nothing_visible_and_loses_no_slot(tmp_path: Path) -> None:
    store = open_store(tmp_path, slabs=1, io_timeout_s=0.05, breaker_failures=1000)
    journal = store._held().writer.journal
    real = journal.append

    def full(records: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    journal.append = full  # type: ignore[method-assign]
    for _ in range(3):
        assert put(store, range(SLAB_SLOTS)) == [False] * SLAB_SLOTS
        eventually(lambda: store._held().slots.counts()[0] == SLAB_SLOTS)
    assert store.contains([key(0)]) == [False]
    journal.append = real  # type: ignore[method-assign]
    assert put(store, range(SLAB_SLOTS)) == [True] * SLAB_SLOTS
    store.close()


def test_used_bytes_are_the_live_slots_after_random_use(tmp_path: Path) -> None:
    """# LMCache#4546, LMCache#2942"""
    chance = random.Random(11)
    store = open_store(tmp_path, slabs=3, io_timeout_s=0.02)
    live: set[int] = set()
    for number in range(300):
        if chance.random() < 0.6:
            wanted = [number * 10 + k for k in range(chance.randrange(1, 6))]
            live |= {n for n, ok in zip(wanted, put(store, wanted), strict=True) if ok}
        elif live:
            gone = chance.sample(sorted(live), min(len(live), chance.randrange(1, 12)))
            store.delete([key(n) for n in gone])
            live -= set(gone)
        if number % 50 == 49:
            assert store.sync(60)
            assert store.sync(60)
            assert store.stats().used_bytes == len(live) * SLOT
            slots = store._held().slots
            assert sum(len(slots.taken(*slab)) for slab in slots.slabs()) == len(live)
    assert get(store, sorted(live)) == [payload(n) for n in sorted(live)]
    free, taken, resting = store._held().slots.counts()
    assert taken == len(live) and (free + taken + resting) % SLAB_SLOTS == 0  # empty slabs are given back
    store.close()
    again = open_store(tmp_path, slabs=3)
    assert again._held().slots.counts()[1:] == (len(live), 0)
    again.close()


def test_closing_does_not_wait_for_a_dead_disk(tmp_path: Path, disk: FaultyBackend) -> None:
    store = open_store(tmp_path, backend=disk, io_threads=1, io_timeout_s=0.1)
    put(store, [0])
    stuck = Event()
    disk.before = lambda call, slab, slot: stuck.wait(30) and None if call == "readv" else None
    running = store.get([key(0)], [aligned(PAYLOAD)], timeout_s=60)
    eventually(lambda: disk.calls[-1][0] == "readv")
    queued = store.get([key(0)], [aligned(PAYLOAD)], timeout_s=60)
    began = monotonic()
    store.close()
    assert monotonic() - began < 20
    assert queued.results() == [False] and not running.done()
    other = open_store(tmp_path)
    assert other.writer != store.writer, "a call may still write to its slabs"
    other.close()
    stuck.set()
    assert running.wait(30)


def test_a_closed_store_misses_and_drops(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, [1])
    store.close()
    store.close()
    assert store.contains([key(1)]) == [False] and store.longest_prefix([key(1)]) == 0
    assert get(store, [1]) == [None] and put(store, [2]) == [False]
    store.touch([key(1)])
    store.delete([key(1)])
    assert not store.sync()
    assert store.stats().hits == 0


def test_a_forked_child_misses_and_drops_and_leaves_its_parent_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, [1])
    (lease,) = (tmp_path / "root").glob("*/writers/*.lease")
    touched = lease.stat().st_mtime_ns
    child = os.fork()
    if not child:  # pytest is not to go on in it
        began = monotonic()
        right = get(store, [1]) == [None] and put(store, [2]) == [False]
        store.close()
        os._exit(0 if right and monotonic() - began < 5 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert lease.stat().st_mtime_ns == touched
    assert put(store, [3]) == [True] and get(store, [1, 2, 3]) == [payload(1), None, payload(3)]
    store.close()


def test_a_slab_made_anew_under_the_name_of_one_that_is_still_open(tmp_path: Path) -> None:
    """An owner gave an empty slab back, and began another one of that number after its next start."""
    writer = open_store(tmp_path)
    put(writer, range(3))
    reader = open_store(tmp_path, index_dir=tmp_path / "reader")
    assert get(reader, range(3)) == [payload(n) for n in range(3)]
    writer.delete([key(n) for n in range(3)])
    assert writer.sync(60)
    writer.close()
    slab_of(tmp_path).unlink()
    writer = open_store(tmp_path)
    put(writer, range(10, 13))
    assert reader.sync(60)
    assert get(reader, range(10, 13)) == [payload(n) for n in range(10, 13)]
    assert reader.stats().misses == {}
    reader.close()
    writer.close()


def test_a_gap_in_a_chain_is_promised_once(tmp_path: Path) -> None:
    """A binary search passes over it. # vllm#49176"""
    store = open_store(tmp_path)
    put(store, range(8))
    store.delete([key(2)])
    assert store.sync(30)
    keys = [key(n) for n in range(8)]
    assert store.longest_prefix(keys) == 8, "it looked at others"
    assert get(store, range(8)) == [payload(n) if n != 2 else None for n in range(8)]
    assert store.longest_prefix(keys) == 2
    put(store, [2])
    assert store.longest_prefix(keys) == 8
    store.close()


def test_behind_a_write_that_failed_nothing_of_the_put_is_stored(tmp_path: Path, disk: FaultyBackend) -> None:
    store = open_store(tmp_path, backend=disk, io_threads=1)
    put(store, range(12))

    def second_run(call: str, slab: str, slot: int) -> None:
        if call == "writev" and slot == 12:
            raise OSError(errno.EIO, "bad sector")

    disk.before = second_run
    assert put(store, range(20, 40)) == [False] * 20
    assert store._held().slots.counts()[1] == 12 and store.stats().dropped == {"error": 20}
    store.close()


def test_a_slab_that_cannot_be_opened_any_more_is_left_for_another(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, range(4))
    slab = slab_of(tmp_path)
    slab.unlink()
    slab.mkdir()
    store._slabs.close()
    assert put(store, range(10, 14)) == [False] * 4
    assert put(store, range(10, 14)) == [True] * 4 and get(store, range(10, 14)) == [payload(n) for n in range(10, 14)]
    store.close()


def test_a_slab_that_somebody_cut_is_a_miss_of_what_is_gone(tmp_path: Path) -> None:
    """And no reason to leave the disk alone for a while."""
    store = open_store(tmp_path, breaker_failures=2)
    put(store, range(SLAB_SLOTS))
    os.truncate(slab_of(tmp_path), 2 * SLOT + 100)
    assert get(store, range(SLAB_SLOTS)) == [payload(0), payload(1)] + [None] * (SLAB_SLOTS - 2)
    assert store.stats().misses == {"error": SLAB_SLOTS - 2}
    store.sync(30)
    assert store.index.totals().keys == 2
    assert put(store, range(2, 5)) == [True] * 3
    assert get(store, range(5)) == [payload(n) for n in range(5)]
    store.close()
