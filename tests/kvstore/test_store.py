"""Blocks come back as they were stored, or not at all."""

from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from deepinfer_kvstore.retention import Retention
from deepinfer_kvstore.store import Put, Store
from store_case import PAYLOAD, SLAB_SLOTS, SLOT, aligned, get, key, open_store, payload, put

LAX = Retention(low=0.96, high=0.97, hard=0.98)
"""Nothing is collected."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with_it = open_store(tmp_path)
    yield with_it
    with_it.close()


@pytest.mark.parametrize("backend", ["posix", "memory"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_blocks_come_back(tmp_path: Path, backend: str, direct: str) -> None:
    store = open_store(tmp_path, backend=backend, direct=direct)
    numbers = list(range(40))
    assert put(store, numbers) == [True] * 40
    assert store.contains([key(n) for n in range(42)]) == [True] * 40 + [False] * 2
    assert store.longest_prefix([key(n) for n in range(42)]) == 40
    assert get(store, numbers) == [payload(n) for n in numbers]
    assert get(store, [41, 3]) == [None, payload(3)]
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.stores, stats.dropped) == (41, {"absent": 1}, 40, {})
    assert stats.used_bytes == 40 * 8192
    assert stats.bytes_stored == 40 * PAYLOAD and stats.bytes_loaded == 41 * PAYLOAD
    store.close()


@pytest.mark.parametrize("length", [1, 511, 4096 - 512, 4096, 4097, 8192 - 512])
def test_lengths_up_to_the_room_of_a_slot(store: Store, length: int) -> None:
    assert put(store, [1], lambda n: payload(n, length)) == [True]
    assert get(store, [1], length) == [payload(1, length)]
    assert get(store, [1], length + 1) == [None]
    assert store.stats().misses == {"length": 1}
    assert store.contains([key(1)]) == [True], "who asks for another length does not hide it from others"


def test_blocks_of_no_or_too_many_bytes_are_dropped(store: Store) -> None:
    assert put(store, [1], lambda n: b"") == [False]
    assert put(store, [1], lambda n: bytes(8192 - 511)) == [False]
    assert store.stats().dropped == {"length": 2}


def test_blocks_are_found_again_after_a_restart(tmp_path: Path) -> None:
    """# LMCache#2273"""
    store = open_store(tmp_path)
    writer = store.writer
    put(store, range(20))
    store.close()
    again = open_store(tmp_path)
    assert again.writer == writer, "it goes on with the slabs of the writer that ended"
    assert get(again, range(20)) == [payload(n) for n in range(20)]
    put(again, range(20, 40))
    again.close()
    elsewhere = open_store(tmp_path, index_dir=tmp_path / "other-node")
    assert get(elsewhere, range(40)) == [payload(n) for n in range(40)]
    elsewhere.close()


def test_another_process_sees_blocks_and_stores_its_own(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path, index_dir=tmp_path / "b")
    assert first.writer != second.writer
    put(first, range(10))
    put(second, range(10, 20))
    assert first.sync(60)
    assert second.sync(60)
    for store in (first, second):
        assert get(store, range(20)) == [payload(n) for n in range(20)]
        store.close()
    assert len(list((tmp_path / "root").glob("*/slabs/*.slab"))) == 2


def test_the_first_put_of_a_key_stays(store: Store) -> None:
    put(store, [1])
    assert put(store, [1], lambda n: payload(99)) == [True]
    assert get(store, [1]) == [payload(1)]
    assert store.stats().duplicates == 1 and store.stats().stores == 1


def test_deleted_blocks_are_gone(store: Store) -> None:
    put(store, range(4))
    store.delete([key(1), key(77)])
    assert store.sync(60)
    assert get(store, range(4)) == [payload(0), None, payload(2), payload(3)]


def test_a_full_store_drops_and_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path, slabs=1)
    results = put(store, range(SLAB_SLOTS + 4))
    assert results == [True] * SLAB_SLOTS + [False] * 4
    assert put(store, [100]) == [False]
    assert store.stats().dropped == {"full": 5}
    store.close()


def test_a_slot_is_written_again_only_after_its_rest(tmp_path: Path) -> None:
    store = open_store(tmp_path, slabs=1)
    slots = store._held().slots
    now = 0.0
    slots._clock = lambda: now
    put(store, range(SLAB_SLOTS))
    store.delete([key(n) for n in range(SLAB_SLOTS)])
    assert store.sync(60)
    assert store.sync(60)
    now = 2 * store.options.io_timeout_s - 1e-6
    assert put(store, [100]) == [False], "readers may still be at it"
    now = 2 * store.options.io_timeout_s
    store._held()._full_until = 0.0  # it has looked for another slab just now
    assert put(store, [101]) == [True]
    assert get(store, [101]) == [payload(101)]
    store.close()


def test_what_a_dropped_transfer_says(store: Store) -> None:
    store.close()
    block = Put(key(1), memoryview(payload(1)), bytes(8), 64)
    transfer = store.put([block])
    assert transfer.done() and transfer.results() == [False]


def test_slabs_of_writers_that_ended_are_taken_over_when_slots_are_wanting(tmp_path: Path) -> None:
    """Three processes become one, which has other slabs besides: it can use all of the capacity."""
    stores = [open_store(tmp_path, slabs=3, index_dir=tmp_path / f"{n}", retention=LAX) for n in range(3)]
    for number, store in enumerate(stores):
        put(store, range(10 * number, 10 * number + 4))
    for store in stores:
        store.close()
    store = open_store(tmp_path, slabs=3, retention=LAX, slab_bytes=SLAB_SLOTS * SLOT // 2, io_timeout_s=0.1)
    assert store.writer not in {other.writer for other in stores}
    deadline, stored = monotonic() + 60, 0
    while stored < 3 * (SLAB_SLOTS - 4):
        assert monotonic() < deadline
        stored += put(store, [1000 + stored]) == [True]
    assert get(store, range(1000, 1000 + stored)) == [payload(n) for n in range(1000, 1000 + stored)]
    old = [10 * number + k for number in range(3) for k in range(4)]
    assert get(store, old) == [payload(n) for n in old]
    store.delete([key(n) for n in old])
    assert store.sync(60)
    store.close()
    again = open_store(tmp_path, slabs=3, retention=LAX)
    assert get(again, range(1000, 1000 + stored)) == [payload(n) for n in range(1000, 1000 + stored)]
    again.close()


def test_clocks_that_jump_change_no_byte(tmp_path: Path) -> None:
    times = iter([10**12, -5, 1 << 62, 0, 10**12])
    store = open_store(tmp_path, clock_ms=lambda: next(times), collect_interval_s=None)
    for number in range(4):
        assert put(store, [number]) == [True]
    store.touch([key(n) for n in range(4)])
    assert store.sync(60)
    assert get(store, range(4)) == [payload(n) for n in range(4)]
    store.close()
    again = open_store(tmp_path, clock_ms=lambda: -1, collect_interval_s=None)
    assert get(again, range(4)) == [payload(n) for n in range(4)]
    again.close()


def test_a_slot_holds_nothing_of_other_blocks(tmp_path: Path) -> None:
    """Gaps are zeros: neither pieces of a shorter block's predecessor nor of other requests."""
    store = open_store(tmp_path, io_threads=1)
    put(store, [1], lambda n: b"\xff" * PAYLOAD)
    put(store, [2], lambda n: b"\xee" * 10)
    store.close()
    (slab,) = (tmp_path / "root").glob("*/slabs/*.slab")
    first, second = slab.read_bytes()[:SLOT], slab.read_bytes()[SLOT : 2 * SLOT]
    assert first[PAYLOAD : SLOT - 512] == bytes(SLOT - 512 - PAYLOAD)
    assert second[10 : SLOT - 512] == bytes(SLOT - 522) and b"\xff" * 100 not in second


@pytest.mark.parametrize(
    "wrong", [{"key": b"short"}, {"parent": b""}, {"parent": bytes(32)}, {"depth": -1}, {"depth": 1 << 32}]
)
def test_a_put_that_no_header_could_hold_is_refused(wrong: dict[str, Any]) -> None:
    fields = {"key": key(1), "buffer": memoryview(b"x"), "parent": bytes(8), "depth": 64}
    with pytest.raises(ValueError, match="must be 34"):
        Put(**{**fields, **wrong})


def test_a_get_without_deadline(store: Store) -> None:
    put(store, [1])
    buffer = aligned(PAYLOAD)
    transfer = store.get([key(1)], [buffer], timeout_s=float("inf"))
    assert transfer.wait(30) and transfer.results() == [True] and not transfer.overdue()
    assert get(store, [1]) == [payload(1)]


def test_buffers_of_other_shapes(store: Store) -> None:
    sent = memoryview(payload(1)).cast("I").cast("B").cast("I", [PAYLOAD // 8, 2])
    transfer = store.put([Put(key(1), sent, bytes(8), 64)])
    assert transfer.wait(30) and transfer.results() == [True]
    got = aligned(PAYLOAD).cast("d")
    transfer = store.get([key(1)], [got])
    assert transfer.wait(30) and transfer.results() == [True] and got.tobytes() == payload(1)


def test_buffers_that_cannot_be_loaded_into_are_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="read-only"):
        store.get([key(1)], [memoryview(b"x")])
    with pytest.raises(ValueError):
        store.get([key(1)], [])


def test_no_blocks(store: Store) -> None:
    assert store.get([], []).done() and store.put([]).done()
    assert store.contains([]) == [] and store.longest_prefix([]) == 0


def test_a_block_put_twice_at_once_is_stored_once(store: Store) -> None:
    assert put(store, [5, 5, 6, 5]) == [True] * 4
    assert store.stats().stores == 2 and store.stats().duplicates == 2
