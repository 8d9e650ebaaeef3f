"""What cannot work is one clear error when the store opens."""

import errno
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deepinfer_kvstore import ownership
from deepinfer_kvstore.descriptor import Group
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.options import StoreOptions
from deepinfer_kvstore.posix import PosixBackend
from deepinfer_kvstore.store import Store
from store_case import SLAB_SLOTS, SLOT, descriptor, get, open_store, options, payload, put

SLAB = SLAB_SLOTS * SLOT


def refused(tmp_path: Path, message: str, **changes: Any) -> None:
    with pytest.raises(StoreConfigError, match=message) as caught:
        open_store(tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity_bytes": SLAB - 1}, f"capacity_bytes is {SLAB - 1}, one slab takes {SLAB}: raise capacity_bytes"),
        ({"capacity_bytes": 1 << 62}, "lower capacity_bytes"),
        ({"slab_bytes": SLOT - 1}, f"slab_bytes is {SLOT - 1}, one slot takes {SLOT}: raise slab_bytes"),
        ({"backend": "tape"}, "backend 'tape': there are posix, usrbio, memory"),
        ({"direct": "maybe"}, "direct 'maybe': it is auto, on or off"),
        ({"io_threads": 0}, "io_threads is 0, it must be at least 1"),
        ({"run_bytes": 0}, "run_bytes is 0"),
        ({"max_inflight_bytes": 0}, "max_inflight_bytes is 0"),
        ({"io_timeout_s": 0.0}, "io_timeout_s is 0.0, it must be more than 0 seconds"),
        ({"lease_s": float("nan")}, "lease_s is nan"),
        ({"secret": b"short"}, "secret has 5 bytes, it must have 32"),
    ],
)
def test_options_out_of_range(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refused(tmp_path, message, **changes)


def test_a_root_that_is_missing_or_a_file(tmp_path: Path) -> None:
    for root in (tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(StoreConfigError, match="is not a directory: create it, or mount its file system"):
            Store.open(root, descriptor(), options(tmp_path))
    assert not (tmp_path / "missing").exists()


def test_a_root_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", read_only)
    (tmp_path / "root").is_dir() or os.mkdir(tmp_path / "root")
    with pytest.raises(StoreConfigError, match=r"cannot be written .*Read-only file system.*check owner, mount and"):
        Store.open(tmp_path / "root", descriptor(), options(tmp_path))


def test_direct_where_the_file_system_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def no_direct(path: Path, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", no_direct)
    refused(tmp_path, "the file system has no O_DIRECT: leave direct at 'auto'", direct="on")
    store = open_store(tmp_path)
    assert put(store, [1]) == [True] and get(store, [1]) == [payload(1)]
    store.close()


def test_a_root_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PosixBackend, "free_bytes", lambda self: SLAB - 1)
    refused(tmp_path, f"has {SLAB - 1} bytes free, one slab takes {SLAB}: free some, or lower slab_bytes")


def test_a_full_root_still_serves_what_is_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    put(store, [1])
    store.close()
    monkeypatch.setattr(PosixBackend, "free_bytes", lambda self: 0)
    store = open_store(tmp_path)
    assert get(store, [1]) == [payload(1)]
    assert put(store, range(100, 100 + SLAB_SLOTS)) == [True] * (SLAB_SLOTS - 1) + [False]
    store.close()


def test_what_engines_of_another_user_could_not_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(tmp_path).close()
    monkeypatch.setattr(ownership, "owner_of", lambda path: 7 if path.is_dir() else 8)
    refused(tmp_path, "belongs to user 7, whose engines cannot read what user 8 writes: run this as user 7")
    assert not list((tmp_path / "root").rglob(".owner-*"))
    open_store(tmp_path, read_only=True).close()


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    refused(tmp_path, "this user has no home: give it, or set HOME", index_dir=None)


def test_a_root_with_a_name_that_is_no_text(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b" \xff\xfe\n\xc3\xbc")
    odd.mkdir()
    for _ in range(2):
        with closing(open_store(odd)) as store:
            put(store, [1])
            assert get(store, [1]) == [payload(1)]


def test_a_store_of_another_format_version(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (meta,) = (tmp_path / "root").glob("*/meta.json")
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format_version": 9}))
    refused(tmp_path, r"meta.json: store format 9, this version reads 1: remove its directory or change root")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": 1}', "\xff"])
def test_a_descriptor_that_is_none(tmp_path: Path, text: str) -> None:
    open_store(tmp_path).close()
    (meta,) = (tmp_path / "root").glob("*/meta.json")
    meta.write_bytes(text.encode("latin-1"))
    refused(tmp_path, "meta.json")


def test_a_descriptor_that_differs(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (meta,) = (tmp_path / "root").glob("*/meta.json")
    meta.write_text(descriptor(weights="others").to_json())
    refused(tmp_path, "describes another model or layout: remove its directory, or use another root")


@pytest.mark.parametrize("text", ["", "{}", '{"slot_bytes": "8192"}', '{"slot_bytes": -1}', "[]"])
def test_a_geometry_that_is_none(tmp_path: Path, text: str) -> None:
    open_store(tmp_path).close()
    (path,) = (tmp_path / "root").glob("*/geometry.json")
    path.write_text(text)
    refused(tmp_path, "geometry.json")


def test_slots_of_two_sizes(tmp_path: Path) -> None:
    open_store(tmp_path, descriptor=descriptor(20_000), slab_bytes=1 << 18).close()
    refused(
        tmp_path, "slots have 24576 bytes, these options make 32768: open with the power_of_two_slots",
        descriptor=descriptor(20_000), slab_bytes=1 << 18, power_of_two_slots=True,
    )  # fmt: skip


def test_slots_of_powers_of_two(tmp_path: Path) -> None:
    wide = descriptor(20_000)
    store = open_store(tmp_path, descriptor=wide, slab_bytes=1 << 18, power_of_two_slots=True)
    numbers = range(12)
    assert put(store, numbers, lambda n: payload(n, 20_000)) == [True] * 12
    assert get(store, numbers, 20_000) == [payload(n, 20_000) for n in numbers]
    assert store.stats().used_bytes == 12 << 15
    store.close()


def test_slabs_cut_otherwise_are_read_but_not_adopted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = store.writer
    put(store, range(4))
    store.close()
    store = open_store(tmp_path, slab_bytes=2 * SLAB)
    assert store.writer != first
    assert get(store, range(4)) == [payload(n) for n in range(4)]
    store.close()


def test_a_reader_of_what_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path, "does not exist: nothing of this model was stored here", read_only=True, capacity_bytes=0)


def test_a_reader_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(tmp_path).close()

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "stat", denied)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    monkeypatch.setattr(Path, "read_text", denied)
    refused(tmp_path, r"meta.json cannot be read .*Permission denied.*: check owner and mount", read_only=True)


def test_a_reader_writes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, range(4))
    store.close()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "root").rglob("*")}
    reader = open_store(tmp_path, read_only=True, capacity_bytes=0, index_dir=tmp_path / "reader")
    assert get(reader, range(5)) == [*(payload(n) for n in range(4)), None]
    assert put(reader, [7]) == [False]
    reader.touch([b""])
    reader.delete([b"x" * 34])
    assert reader.sync(60)
    reader.close()
    assert reader.writer is None and reader.stats().dropped == {"read_only": 1}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "root").rglob("*")} == before


def test_groups_of_several_sizes_share_slots(tmp_path: Path) -> None:
    two = descriptor(groups=(Group(1, 64, 9000), Group(2, 64, 300, window_tokens=128)))
    store = open_store(tmp_path, descriptor=two)
    assert put(store, [1], lambda n: payload(n, 9000)) == [True]
    assert put(store, [2], lambda n: payload(n, 300)) == [True]
    assert get(store, [1], 9000) == [payload(1, 9000)] and get(store, [2], 300) == [payload(2, 300)]
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"}, {"weights": "x"}, {"kv_dtype": "fp8"}, {"record_format": "s"}, {"layout": "m"},
        {"hash_algorithm": "sha256"}, {"none_hash": "01"}, {"hash_tokens": 32}, {"shards": "0 of 2"},
        {"groups": (Group(2, 64, 6000),)}, {"groups": (Group(1, 32, 6000),)}, {"groups": (Group(1, 64, 6000, 128),)},
        {"format_version": 2},
    ],
)  # fmt: skip
def test_a_field_of_the_descriptor_that_differs_means_no_hit(tmp_path: Path, change: dict[str, Any]) -> None:
    """# sglang#33268, lmdeploy#4930, LMCache#4463"""
    store = open_store(tmp_path)
    put(store, range(3))
    store.close()
    if "format_version" in change:
        refused(tmp_path, "store format 2", descriptor=descriptor(**change))
        return
    other = open_store(tmp_path, descriptor=descriptor(**change))
    assert get(other, range(3)) == [None] * 3
    other.close()


def test_bytes_of_another_namespace_in_our_slots_are_no_hit(tmp_path: Path) -> None:
    """Somebody copied slabs and journals: headers name their model."""
    ours, theirs = open_store(tmp_path), open_store(tmp_path, descriptor=descriptor(weights="x"))
    for store in (ours, theirs):
        put(store, range(3))
        store.close()
    root = tmp_path / "root"
    for mine in (root / descriptor().directory / "slabs").iterdir():
        (other,) = (root / descriptor(weights="x").directory / "slabs").iterdir()
        mine.write_bytes(other.read_bytes())
    store = open_store(tmp_path)
    assert get(store, range(3)) == [None] * 3
    assert store.stats().misses == {"namespace": 3}
    store.close()


def test_defaults_need_only_a_capacity() -> None:
    StoreOptions(capacity_bytes=1 << 30).check()
    with pytest.raises(StoreConfigError, match="capacity_bytes is 0"):
        StoreOptions().check()
