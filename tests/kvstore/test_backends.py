"""What every back end promises, and what posix adds."""

import errno
import os
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

import pytest

from deepinfer_kvstore import posix
from deepinfer_kvstore.backend import Backend, ShortRead
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import Geometry
from deepinfer_kvstore.memory import MemoryBackend
from deepinfer_kvstore.posix import PosixBackend
from deepinfer_kvstore.slabs import OpenSlabs, parse_slab_name, slab_name

SLOT = 8192
GEOMETRY = Geometry(SLOT, 16)


@pytest.fixture(params=["posix", "posix-buffered", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "memory":
        return MemoryBackend(GEOMETRY.slab_bytes * 2)
    return PosixBackend(tmp_path, GEOMETRY, direct="off" if request.param == "posix-buffered" else "auto")


def pages(count: int, fill: bytes = b"\0") -> memoryview:
    view = memoryview(mmap(-1, count * 4096))
    view[:] = fill * len(view)
    return view


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_bytes_come_back(backend: Backend, shift: int) -> None:
    slab = backend.create("a.slab", SLOT, 16)
    sent = memoryview(bytearray(os.urandom(3 * SLOT + shift)))[shift:]
    slab.writev(2, [sent[:5000], sent[5000:6000], sent[6000:]])
    got = pages(7)[shift : shift + 3 * SLOT]
    backend.open("a.slab", write=False).readv(2, [got[:4096], got[4096:20000], got[20000:]])
    assert got == sent
    slab.sync()
    slab.close()
    slab.close()


def test_what_was_never_written_or_was_punched_reads_as_zeros(backend: Backend) -> None:
    slab = backend.create("a.slab", SLOT, 16)
    slab.writev(0, [pages(4, b"x")])
    slab.punch(1, 1)
    got = pages(8, b"y")
    slab.readv(0, [got])
    assert bytes(got) == b"x" * SLOT + bytes(3 * SLOT)


def test_names(backend: Backend) -> None:
    backend.create("a.slab", SLOT, 16)
    with pytest.raises(FileExistsError):
        backend.create("a.slab", SLOT, 16)
    backend.create("b.slab", SLOT, 16)
    assert sorted(backend.names()) == ["a.slab", "b.slab"]
    backend.remove("a.slab")
    backend.remove("a.slab")
    assert backend.names() == ["b.slab"]
    with pytest.raises(FileNotFoundError):
        backend.open("a.slab", write=False)


def test_a_reader_reads_on_in_a_slab_that_is_removed(backend: Backend) -> None:
    backend.create("a.slab", SLOT, 16).writev(0, [pages(2, b"x")])
    slab = backend.open("a.slab", write=False)
    backend.remove("a.slab")
    got = pages(2)
    slab.readv(0, [got])
    assert bytes(got) == b"x" * SLOT


def test_reading_beyond_the_end_is_an_error_not_zeros(backend: Backend) -> None:
    slab = backend.create("a.slab", SLOT, 16)
    with pytest.raises(ShortRead) as caught:
        slab.readv(15, [pages(4)])
    assert caught.value.errno == errno.EIO


def test_space_is_taken_when_a_slab_is_made(backend: Backend) -> None:
    before = backend.free_bytes()
    backend.create("a.slab", SLOT, 16)
    assert before - backend.free_bytes() >= GEOMETRY.slab_bytes or not isinstance(backend, MemoryBackend)


def test_memory_is_bounded() -> None:
    backend = MemoryBackend(GEOMETRY.slab_bytes)
    backend.create("a.slab", SLOT, 16)
    with pytest.raises(OSError) as caught:
        backend.create("b.slab", SLOT, 1)
    assert caught.value.errno == errno.ENOSPC


def test_a_slab_takes_its_space_on_disk_when_it_is_made(tmp_path: Path) -> None:
    PosixBackend(tmp_path, GEOMETRY).create("a.slab", SLOT, 16)
    assert (tmp_path / "a.slab").stat().st_blocks * 512 >= GEOMETRY.slab_bytes
    assert (tmp_path / "a.slab").stat().st_mode & 0o777 == 0o600


def test_a_slab_that_cannot_be_reserved_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(posix, "_fallocate", full)
    with pytest.raises(OSError):
        PosixBackend(tmp_path, GEOMETRY).create("a.slab", SLOT, 16)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_fallocate_gets_a_sparse_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(posix, "_fallocate", unsupported)
    slab = PosixBackend(tmp_path, GEOMETRY).create("a.slab", SLOT, 16)
    assert (tmp_path / "a.slab").stat().st_size == GEOMETRY.slab_bytes
    slab.punch(0, 1)


def test_more_buffers_than_the_kernel_takes_at_once(tmp_path: Path) -> None:
    slab = PosixBackend(tmp_path, Geometry(4096, 16)).create("a.slab", 4096, 16)
    sent = memoryview(os.urandom(4 * 4096))
    slab.writev(0, [sent[at : at + 4] for at in range(0, len(sent), 4)])
    got = memoryview(bytearray(len(sent)))
    slab.readv(0, [got[at : at + 8] for at in range(0, len(got), 8)])
    assert got == sent


@pytest.mark.parametrize("at_once", [1, 777, 4096, 5000])
def test_calls_that_move_less_than_asked_are_continued(at_once: int) -> None:
    source, moved = os.urandom(20000), bytearray()

    def call(_: int, buffers: list[memoryview], offset: int) -> int:
        assert offset == 100 + len(moved)
        data = b"".join(buffers)[:at_once]
        moved.extend(data)
        return len(data)

    view = memoryview(source)
    posix._whole(call, 0, [view[:3], view[3:10000], view[10000:]], 100, "a")
    assert bytes(moved) == source


def test_aligned_memory_goes_past_the_page_cache_and_other_memory_through_it(tmp_path: Path) -> None:
    slab = PosixBackend(tmp_path, GEOMETRY).create("a.slab", SLOT, 16)
    if slab.direct_fd is None:
        pytest.skip("no O_DIRECT on this file system")
    buffered, slab.fd = slab.fd, -1
    slab.writev(0, [pages(1, b"x"), pages(3, b"y")])
    got = pages(4)
    slab.readv(0, [got])
    assert bytes(got) == b"x" * 4096 + b"y" * 3 * 4096
    unaligned = pages(3)[1 : 1 + SLOT]
    with pytest.raises(OSError) as caught:
        slab.readv(0, [unaligned])
    assert caught.value.errno == errno.EBADF, "it was asked of the file that is closed here"
    slab.fd = buffered
    slab.readv(0, [unaligned])
    assert unaligned == got[:SLOT]
    slab.close()


def no_direct(real: Callable[..., int]) -> Callable[..., int]:
    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(path, flags, mode)

    return opened


def test_a_file_system_without_o_direct_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sound = PosixBackend(tmp_path, GEOMETRY, direct="on")
    monkeypatch.setattr(posix.os, "open", no_direct(os.open))
    backend = PosixBackend(tmp_path, GEOMETRY)
    for name in ("a.slab", "b.slab"):
        backend.create(name, SLOT, 16).writev(0, [pages(2, b"x")])
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: no O_DIRECT on this file system, blocks go through the page cache"
    ]
    with pytest.raises(StoreConfigError, match="has no O_DIRECT: leave direct at 'auto'"):
        PosixBackend(tmp_path, GEOMETRY, direct="on")
    assert sorted(backend.names()) == sorted(os.listdir(tmp_path)) == ["a.slab", "b.slab"]
    with pytest.raises(OSError, match="no O_DIRECT"):  # no error of configuration once it is open
        sound.create("c.slab", SLOT, 16)
    assert not (tmp_path / "c.slab").exists()


def test_names_of_slabs() -> None:
    assert slab_name(0xDEADBEEF, 7) == "deadbeef-00000007.slab"
    assert parse_slab_name("deadbeef-00000007.slab") == (0xDEADBEEF, 7)
    for other in ("", "x.slab", "deadbeef-00000007.slab.tmp", "DEADBEEF-00000007.slab", "deadbeef_00000007.slab"):
        assert parse_slab_name(other) is None


def test_open_slabs_are_bounded_and_never_closed_in_use(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path, GEOMETRY, direct="off")
    for number in range(4):
        backend.create(slab_name(1, number), SLOT, 16).writev(0, [pages(2, bytes([number]))])

    def files() -> int:
        return sum("slab" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if exists(fd))

    def exists(fd: str) -> bool:
        return os.path.lexists(f"/proc/self/fd/{fd}")

    before = files()
    slabs = OpenSlabs(backend, max_open=2)
    with slabs.use(slab_name(1, 0)) as first:
        for number in range(1, 4):
            with slabs.use(slab_name(1, number)) as slab:
                got = pages(2)
                slab.readv(0, [got])
                assert got[0] == number
        assert files() - before == 3, "two kept, one in use"
        slabs.forget(slab_name(1, 0))
        got = pages(2, b"x")
        first.readv(0, [got])
        assert got[0] == 0
    assert files() - before == 2
    with slabs.use(slab_name(1, 3), write=True) as slab:
        slab.writev(0, [pages(2, b"z")])
    slabs.close()
    assert files() == before
