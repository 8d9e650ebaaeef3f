"""Reads through the kernel's asynchronous I/O, against plain reads of the same files."""

import ctypes
import errno
import os
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

import pytest

from deepinfer_kvstore import aio
from deepinfer_kvstore.aio import Read, Ring, Rings
from deepinfer_kvstore.code import Code
from deepinfer_kvstore.erasure import ErasureBackend
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.posix import PosixBackend
from deepinfer_kvstore.shards import Shards

PAGE = 4096


@pytest.fixture
def ring() -> Iterator[Ring]:
    try:
        ring = Ring(8)
    except OSError as error:
        pytest.skip(f"no asynchronous I/O here: {error}")
    yield ring
    ring.close()


@pytest.fixture
def direct_file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """A file of 16 pages, open past the page cache, and its bytes."""
    content = os.urandom(16 * PAGE)
    (tmp_path / "file").write_bytes(content)
    try:
        fd = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    yield fd, content
    os.close(fd)


class Memory:
    """Page-aligned memory."""

    def __init__(self, pages: int) -> None:
        self.bytes = mmap(-1, pages * PAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))


def test_ranges_of_a_file_come_as_pread_gives_them(ring: Ring, direct_file: tuple[int, bytes]) -> None:
    fd, content = direct_file
    memory = Memory(8)
    ended: dict[int, bool] = {}
    places = [3, 0, 14, 7]
    reads = [
        Read(fd, memory.address + at * 2 * PAGE, 2 * PAGE, page * PAGE, lambda ok, at=at: ended.update({at: ok}))
        for at, page in enumerate(places)
    ]
    assert ring.start(reads) == 4
    assert ring.room == 4
    ring.wait(4, 30.0)
    assert ended == dict.fromkeys(range(4), True)
    assert ring.room == 8
    for at, page in enumerate(places):
        assert memory.bytes[at * 2 * PAGE :][: 2 * PAGE] == content[page * PAGE :][: 2 * PAGE]


def test_a_read_beyond_the_end_and_one_of_no_file_are_told(ring: Ring, direct_file: tuple[int, bytes]) -> None:
    fd, _ = direct_file
    memory = Memory(4)
    ended: list[tuple[str, bool]] = []
    reads = [
        Read(fd, memory.address, 2 * PAGE, 15 * PAGE, lambda ok: ended.append(("short", ok))),
        Read(1 << 20, memory.address + 2 * PAGE, PAGE, 0, lambda ok: ended.append(("no file", ok))),
    ]
    assert ring.start(reads) == 1
    ring.wait(1, 30.0)
    assert ended == [("short", False)]
    assert ring.start(reads[1:]) == 0
    assert ring.idle


def test_rings_are_used_again_and_bring_what_came_late(direct_file: tuple[int, bytes]) -> None:
    fd, _ = direct_file
    rings = Rings(2)
    first = rings.take()
    if first is None:
        pytest.skip("no asynchronous I/O here")
    assert rings.take() is not first
    memory, ended = Memory(1), []
    first.start([Read(fd, memory.address, PAGE, 0, ended.append)])
    rings.give_back(first)
    while not ended:
        again = rings.take()
        assert again is first
        rings.give_back(again)
    assert ended == [True]
    rings.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EAGAIN])
def test_a_system_that_refuses_is_asked_once(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(entries: int) -> Ring:
        asked.append(entries)
        raise OSError(number, "refused")

    monkeypatch.setattr(aio, "Ring", refuse)
    rings = Rings(12)
    assert rings.take() is None
    assert rings.take() is None
    assert asked == [24]
    rings.close()


@pytest.mark.parametrize("way", ["asynchronous", "page cache", "threads"])
def test_every_way_to_read_gives_the_same_slots(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, geometry = Code(4, 2), Geometry(5 * PAGE, 16)
    stored = Shards(code, geometry.slot_bytes, 1).stored_bytes
    direct = "auto" if way == "asynchronous" else "off"
    if way == "threads":
        monkeypatch.setattr("deepinfer_kvstore.posix.PosixSlab.readv_cached", lambda *_: False)
    for number in range(6):
        (tmp_path / str(number)).mkdir()
    roots = [(str(n), PosixBackend(tmp_path / str(n), Geometry(stored, 16), direct=direct)) for n in range(6)]
    backend = ErasureBackend(roots, code, geometry, 1)
    slab = backend.create("00000001-00000000.slab", geometry.slot_bytes, geometry.slab_slots)
    content = os.urandom(12 * geometry.slot_bytes)
    slab.writev(2, [memoryview(content)])
    slab.sync()
    for first, slots in [(2, 12), (5, 1), (9, 4)]:
        got = memoryview(bytearray(slots * geometry.slot_bytes))
        slab.readv(first, [got[:100], got[100 : 2 * PAGE], got[2 * PAGE :]])
        assert got == content[(first - 2) * geometry.slot_bytes :][: len(got)]
    for number in (1, 4):  # two roots lose their files' ends: short reads
        path = tmp_path / str(number) / slab.name
        os.truncate(path, 5 * stored)
    got = memoryview(bytearray(12 * geometry.slot_bytes))
    slab.readv(2, [got])
    assert got == content
    slab.close()
    backend.close()
