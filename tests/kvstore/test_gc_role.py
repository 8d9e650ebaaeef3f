"""The daemon collects in place of engines."""

import asyncio
import logging
from pathlib import Path
from time import monotonic, time_ns

import pytest

from deepinfer_kvstore import ownership
from deepinfer_kvstore.daemon import Daemon, DaemonOptions
from deepinfer_kvstore.gc_role import Collectors
from deepinfer_kvstore.namespaces import Namespaces
from deepinfer_kvstore.quota import Quota
from deepinfer_kvstore.retention import Retention
from store_case import SLAB_SLOTS, descriptor, get, key, open_store, put


def test_the_quota_is_that_of_the_engine_that_opened_last(tmp_path: Path) -> None:
    open_store(tmp_path, slabs=4).close()
    (path,) = (tmp_path / "root").glob("*/quota.json")
    assert Quota.read(path) == Quota(4 * SLAB_SLOTS * 8192, 8192, Retention())
    open_store(tmp_path, slabs=8, retention=Retention(ttl={"agent": 60}, high=0.9)).close()
    assert Quota.read(path) == Quota(8 * SLAB_SLOTS * 8192, 8192, Retention(high=0.9))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"capacity_bytes": 1}',
        '{"capacity_bytes": 1, "slot_bytes": 8192, "low": 0.8, "high": 0.85, "hard": 0.95, "expired_per_hour": 0.1}',
        '{"capacity_bytes": 9999, "slot_bytes": 0, "low": 0.8, "high": 0.85, "hard": 0.95, "expired_per_hour": 0.1}',
        '{"capacity_bytes": 9999, "slot_bytes": 1, "low": 0.9, "high": 0.85, "hard": 0.95, "expired_per_hour": 0.1}',
        '{"capacity_bytes": 9999, "slot_bytes": 1, "low": null, "high": 0.85, "hard": 0.95, "expired_per_hour": 1}',
        '{"capacity_bytes": 1e999, "slot_bytes": 1, "low": 0.8, "high": 0.85, "hard": 0.95, "expired_per_hour": 1}',
        "[" * 4000,
    ],
)  # fmt: skip
def test_a_file_that_is_no_quota_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "quota.json").write_text(text)
    assert Quota.read(tmp_path / "quota.json") is None


def test_each_namespace_is_collected_down_to_its_own_low_mark(tmp_path: Path) -> None:
    stores = [
        open_store(tmp_path, slabs=slabs, descriptor=descriptor(model=model), index_dir=tmp_path / "engine")
        for model, slabs in (("a", 4), ("b", 8))
    ]
    for store in stores:
        put(store, range(4 * SLAB_SLOTS - 4))
    namespaces = Namespaces(tmp_path / "root", tmp_path / "daemon")
    namespaces.scan()
    for namespace in namespaces.all():
        namespace.sync()
    collectors = Collectors(namespaces.all)
    assert collectors.collect() == {"space": 60 - 51}
    assert collectors.collect() == {}
    for store, left in zip(stores, (51, 60), strict=True):
        store.sync()
        assert sum(store.contains([key(n) for n in range(60)])) == left
    collectors.close()
    namespaces.close()
    for store in stores:
        store.close()
    assert not list((tmp_path / "root").glob("*/gc.lease"))


@pytest.mark.parametrize("trouble", ["another user's", "no lease can be there"])
def test_a_namespace_that_cannot_be_written_keeps_no_other_from_being_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    stores = {
        name: open_store(tmp_path, descriptor=descriptor(model=name), index_dir=tmp_path / "engine") for name in "ab"
    }
    for store in stores.values():
        put(store, range(4 * SLAB_SLOTS - 4))
    namespaces = Namespaces(tmp_path / "root", tmp_path / "daemon")
    namespaces.scan()
    for namespace in namespaces.all():
        namespace.sync()
    bad = namespaces.all()[0]  # which comes first
    if trouble == "another user's":
        monkeypatch.setattr(ownership, "owner_of", lambda path: 7 if path == bad.places.namespace else 8)
    else:
        (bad.places.namespace / "gc.lease").mkdir()
    collectors = Collectors(namespaces.all)
    with caplog.at_level(logging.WARNING):
        assert collectors.collect() == {"space": 60 - 51}
        assert collectors.collect() == {}
    said = [record.getMessage() for record in caplog.records if "is not collected" in record.getMessage()]
    assert len(said) == 1 and bad.name in said[0]
    collectors.close()
    namespaces.close()
    for store in stores.values():
        store.close()


def test_a_namespace_that_is_removed_is_let_go(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    namespaces = Namespaces(tmp_path / "root", tmp_path / "daemon")
    namespaces.scan()
    collectors = Collectors(namespaces.all)
    collectors.collect()
    (directory,) = (tmp_path / "root").iterdir()
    directory.rename(tmp_path / "gone")
    namespaces.scan()
    assert collectors.collect() == {}
    collectors.close()
    namespaces.close()


def test_what_a_daemon_holds_for_a_ticket_no_engine_collects(tmp_path: Path) -> None:
    """LMCache#1690: CHECK said that the blocks are there, and the engine comes a moment later."""
    store = open_store(tmp_path, slabs=4, collect_interval_s=0.02)
    assert all(put(store, range(8)))
    namespaces = Namespaces(tmp_path / "root", tmp_path / "daemon")
    namespaces.scan()
    (namespace,) = namespaces.all()
    namespace.sync()
    namespace.pin([key(2), key(5)], time_ns() // 1_000_000 + 300_000)
    namespace.sync()
    first, deadline = 100, monotonic() + 60
    while sum(store.contains([key(n) for n in range(8)])) > 2:
        assert monotonic() < deadline
        put(store, range(first, first + 4))
        first += 4
    assert [n for n in range(8) if store.contains([key(n)])[0]] == [2, 5]
    assert all(get(store, [2, 5]))
    namespaces.close()
    store.close()


def test_engines_leave_collection_to_a_daemon_that_lives(tmp_path: Path) -> None:
    async def scene() -> None:
        store = open_store(tmp_path, slabs=4)
        daemon = Daemon(DaemonOptions(tmp_path / "root", roles=("gc",), index_dir=tmp_path / "daemon"))
        stop, began = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(daemon.run(stop, began.set))
        await asyncio.wait_for(began.wait(), 30)
        deadline = monotonic() + 30
        while not (lease := list((tmp_path / "root").glob("*/gc.lease"))):
            assert monotonic() < deadline
            await asyncio.sleep(0.02)
        engine = open_store(tmp_path, slabs=4, collect_interval_s=0.02, index_dir=tmp_path / "engine")
        await asyncio.to_thread(put, store, range(4 * SLAB_SLOTS - 2))
        while (
            daemon.metrics.registry.get_sample_value("deepinfer_kvstore_evicted_blocks_total", {"reason": "space"})
            is None
        ):
            assert monotonic() < deadline
            await asyncio.sleep(0.02)
        assert engine.stats().evicted == {}
        stop.set()
        await running
        while engine._gc is None or not engine._gc._collector._lease.held():
            assert monotonic() < deadline
            await asyncio.sleep(0.02)
        store.close()
        engine.close()
        assert not lease[0].exists()

    asyncio.run(scene())
