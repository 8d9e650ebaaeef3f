"""The USRBIO back end against a fake of 3FS's package, which can hold up, shorten, tear, fail and lose what it does."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_hf3fs import FakeHf3fs

from deepinfer_kvstore import usrbio
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.store import Store
from deepinfer_kvstore.usrbio import MAX_ASIDE, RING_BYTES, UsrbioBackend, UsrbioSlab
from store_case import descriptor, get, options, payload, put

SLOT = 8192
GEOMETRY = Geometry(SLOT, 16)
NAME = "00000001-00000000.slab"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHf3fs:
    """The package, with a mount below `tmp_path`."""
    fake = FakeHf3fs(tmp_path / "3fs")
    (fake.mount / "kv").mkdir()
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", SimpleNamespace(io=fake))
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", fake)
    monkeypatch.setattr(usrbio, "RING_BYTES", 4 * SLOT)
    return fake


@pytest.fixture
def backend(fake: FakeHf3fs) -> Iterator[UsrbioBackend]:
    backend = UsrbioBackend(fake.mount / "kv", GEOMETRY, threads=2, timeout_seconds=30.0)
    yield backend
    backend.close()


@pytest.fixture
def slab(backend: UsrbioBackend) -> Iterator[UsrbioSlab]:
    slab = backend.create(NAME, SLOT, 16)
    yield slab
    slab.close()


def hurry(backend: UsrbioBackend) -> None:
    """Let deadlines pass soon."""
    backend._rings._timeout_seconds = 0.02


def read(slab: UsrbioSlab, first: int, slots: int = 1) -> bytes:
    got = bytearray(b"\xaa" * (slots * SLOT))
    slab.readv(first, [memoryview(got)])
    return bytes(got)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("deepinfer-")}


def test_bytes_come_back_through_any_pieces_and_more_of_them_than_a_ring_holds(slab: UsrbioSlab) -> None:
    content = os.urandom(11 * SLOT)
    view = memoryview(content)
    slab.writev(2, [view[:100], view[100 : 5 * SLOT + 7], view[5 * SLOT + 7 :]])
    got = memoryview(bytearray(11 * SLOT))
    slab.readv(2, [got[: 6 * SLOT], got[6 * SLOT : 6 * SLOT + 1], got[6 * SLOT + 1 :]])
    assert got == content
    assert read(slab, 4, 3) == content[2 * SLOT : 5 * SLOT]


def test_what_was_written_is_in_the_file_for_the_fuse_client_too(slab: UsrbioSlab, fake: FakeHf3fs) -> None:
    slab.writev(3, [memoryview(b"x" * SLOT)])
    assert (fake.mount / "kv" / NAME).read_bytes()[3 * SLOT : 4 * SLOT] == b"x" * SLOT


def test_each_thread_and_direction_has_its_ring(slab: UsrbioSlab, fake: FakeHf3fs) -> None:
    """`prepare` is not thread-safe; the fake asserts that a ring has one thread."""
    threads = [threading.Thread(target=lambda: slab.writev(1, [memoryview(bytes(SLOT))])) for _ in range(4)]
    for thread in threads:
        thread.start()
        thread.join()
    for _ in range(3):
        read(slab, 1)
        slab.writev(1, [memoryview(bytes(SLOT))])
    assert sorted(ring._for_read for ring in fake.rings) == [False] * 5 + [True]
    assert all(ring._entries == 4 for ring in fake.rings), "as deep as its memory, no deeper"


def test_a_file_is_registered_once_a_slab_and_given_up_before_it_is_closed(
    backend: UsrbioBackend, fake: FakeHf3fs
) -> None:
    slab = backend.create(NAME, SLOT, 16)
    (fd,) = fake.registered
    for _ in range(3):
        read(slab, 0)
    again = backend.open(NAME, write=False)
    assert len(fake.registered) == 2
    again.close()
    slab.close()
    slab.close()
    assert fake.registered == {}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_file_that_cannot_be_registered_is_not_left_open(backend: UsrbioBackend, fake: FakeHf3fs) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fake.refuse = {"register_fd"}
    with pytest.raises(OSError, match="register_fd is refused"):
        backend.create(NAME, SLOT, 16)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fault", ["short", "failing"])
def test_one_part_that_fails_fails_the_call_and_no_other(slab: UsrbioSlab, fake: FakeHf3fs, fault: str) -> None:
    content = os.urandom(4 * SLOT)
    slab.writev(0, [memoryview(content)])
    setattr(fake, fault, 1)
    with pytest.raises(OSError, match="3FS: (Input/output error|4096 of 8192 bytes)"):
        read(slab, 0, 4)
    assert read(slab, 0, 4) == content
    setattr(fake, fault, 1)
    with pytest.raises(OSError, match="3FS"):
        slab.writev(0, [memoryview(content)])
    slab.writev(0, [memoryview(content)])
    assert len(fake.rings) == 2, "nothing was due any more, so they are used on"


def test_a_late_read_never_touches_buffers_handed_back(
    backend: UsrbioBackend, slab: UsrbioSlab, fake: FakeHf3fs
) -> None:
    """It falls into the memory of a ring that is kept aside until then."""
    content = os.urandom(4 * SLOT)
    slab.writev(0, [memoryview(content)])
    fake.held = True
    hurry(backend)
    got = bytearray(b"\xee" * (4 * SLOT))
    with pytest.raises(TimeoutError, match="4 of 4 parts did not come in time"):
        slab.readv(0, [memoryview(got)])
    (late,) = backend._rings._aside
    fake.release()
    assert read(slab, 0, 4) == content, "with another ring"
    assert got == b"\xee" * (4 * SLOT)
    assert late.due == 0, "its completions were taken when the other was made"
    assert bytes(late._memory[: 4 * SLOT]) == content
    assert backend._rings._aside == []


def test_a_lost_completion_costs_a_ring_and_not_a_thread(
    backend: UsrbioBackend, slab: UsrbioSlab, fake: FakeHf3fs
) -> None:
    """vLLM's hf3fs connector waits for ever."""
    hurry(backend)
    slab.writev(0, [memoryview(b"l" * (2 * SLOT))])
    fake.lost = 1
    with pytest.raises(TimeoutError, match="1 of 2 parts"):
        read(slab, 0, 2)
    assert read(slab, 0, 2) == b"l" * (2 * SLOT)
    assert len(backend._rings._aside) == 1


def test_rings_that_wait_for_completions_are_bounded(backend: UsrbioBackend, slab: UsrbioSlab, fake: FakeHf3fs) -> None:
    """3FS#287: memory."""
    hurry(backend)
    fake.held = True
    for _ in range(MAX_ASIDE):
        with pytest.raises(TimeoutError):
            read(slab, 0)
    with pytest.raises(OSError, match="16 rings wait for completions"):
        read(slab, 0)
    assert len(fake.rings) == MAX_ASIDE
    fake.release()
    backend._rings._timeout_seconds = 30.0
    assert read(slab, 0) == bytes(SLOT)


def test_parts_that_were_prepared_end_even_if_the_next_one_is_refused(
    backend: UsrbioBackend, slab: UsrbioSlab, fake: FakeHf3fs
) -> None:
    read(slab, 0)
    fake.rings[0]._entries = 2
    with pytest.raises(OSError, match="the ring is full"):
        read(slab, 0, 4)
    assert read(slab, 0, 4) == bytes(4 * SLOT)
    assert len(fake.rings) == 2
    assert backend._rings._aside == []


@pytest.mark.parametrize("call", ["make_iovec", "make_ioring"])
def test_a_ring_that_cannot_be_made_is_an_error_of_that_call(slab: UsrbioSlab, fake: FakeHf3fs, call: str) -> None:
    """3FS#214, #296."""
    fake.refuse = {call}
    with pytest.raises(OSError, match=f"{call} is refused"):
        read(slab, 0)
    assert shared_memory() == set()
    fake.refuse = set()
    assert read(slab, 0) == bytes(SLOT)


def test_no_shared_memory_is_left_behind_not_even_by_a_process_that_is_killed(slab: UsrbioSlab) -> None:
    """vllm#57303: 3FS has it open by its name, which is gone at once."""
    read(slab, 0)
    assert shared_memory() == set()


def test_a_punched_slot_is_an_error_when_read(slab: UsrbioSlab, fake: FakeHf3fs) -> None:
    slab.writev(0, [memoryview(b"p" * (4 * SLOT))])
    slab.punch(1, 2)
    assert fake.punched == [(SLOT, 3 * SLOT)]
    with pytest.raises(OSError, match="3FS"):
        read(slab, 0, 4)
    assert read(slab, 0) == read(slab, 3) == b"p" * SLOT


def test_slots_that_are_no_chunk_are_not_punched(backend: UsrbioBackend, fake: FakeHf3fs) -> None:
    slab = backend.create("00000001-00000001.slab", 3 * 4096, 4)
    slab.punch(0, 4)
    assert fake.punched == []
    slab.close()


def test_sync_tells_3fs(slab: UsrbioSlab, fake: FakeHf3fs) -> None:
    slab.sync()
    assert fake.synced == 1


def test_without_the_package_the_store_says_what_to_do(tmp_path: Path) -> None:
    """Never a silent fall-back."""
    with pytest.raises(StoreConfigError, match="needs hf3fs_fuse.io .*install it, or set backend to posix"):
        UsrbioBackend(tmp_path, GEOMETRY, threads=1, timeout_seconds=1.0)


def test_a_directory_elsewhere_is_refused(fake: FakeHf3fs, tmp_path: Path) -> None:
    with pytest.raises(StoreConfigError, match="is not on a 3FS mount"):
        UsrbioBackend(tmp_path, GEOMETRY, threads=1, timeout_seconds=1.0)


def test_too_little_shared_memory_is_said_at_open(fake: FakeHf3fs, monkeypatch: pytest.MonkeyPatch) -> None:
    """# UCM#1282, 3FS#296: not a SIGBUS later."""
    monkeypatch.setattr(usrbio, "RING_BYTES", RING_BYTES)
    real = os.statvfs

    def small(path: Any) -> Any:
        found = real(path)
        return SimpleNamespace(f_bavail=1024, f_frsize=4096, f_blocks=found.f_blocks) if path == usrbio.SHM else found

    monkeypatch.setattr(usrbio.os, "statvfs", small)
    with pytest.raises(StoreConfigError, match="/dev/shm has 4194304 bytes free, 8 threads need 67108864"):
        UsrbioBackend(fake.mount / "kv", GEOMETRY, threads=8, timeout_seconds=1.0)


def open_store(fake: FakeHf3fs, tmp_path: Path, **changes: Any) -> Store:
    root = fake.mount / "kv"
    return Store.open(root, descriptor(), options(tmp_path, backend="usrbio", **changes))


def test_a_store_over_it_survives_everything_that_goes_wrong(fake: FakeHf3fs, tmp_path: Path) -> None:
    """Every block is right or a miss: short, torn, failed and lost parts, and a restart."""
    store = open_store(fake, tmp_path, io_timeout_s=0.5)
    assert put(store, range(8)) == [True] * 8
    assert get(store, range(8)) == [payload(n) for n in range(8)]
    fake.torn = 2
    assert put(store, range(8, 16)) == [True] * 8
    found = get(store, range(8, 16))
    assert sum(block is None for block in found) == 2
    assert all(block in (None, payload(n)) for n, block in zip(range(8, 16), found, strict=True))
    for fault in ("short", "failing", "lost"):
        setattr(fake, fault, 1)
        for _ in range(2):
            found = get(store, range(8))
            assert all(block in (None, payload(n)) for n, block in zip(range(8), found, strict=True))
        setattr(fake, fault, 0)
    store.close()
    again = open_store(fake, tmp_path)
    assert get(again, range(8)) == [payload(n) for n in range(8)]
    again.close()
    assert fake.registered == {}


def test_a_coded_store_over_it(fake: FakeHf3fs, tmp_path: Path) -> None:
    roots = [fake.mount / f"kv{number}" for number in range(6)]
    for root in roots:
        root.mkdir()
    fields: dict[str, Any] = {"ec": "4+2", "roots": tuple(roots), "backend": "usrbio"}
    store = Store.open(roots[0], descriptor(), options(tmp_path, **fields))
    assert put(store, range(20)) == [True] * 20
    fake.failing = 2
    assert get(store, range(20)) == [payload(n) for n in range(20)]
    store.close()
