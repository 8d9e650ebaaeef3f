"""The store below host rows: lookups, transfers, and what fails."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, Medium

from deepinfer_kvstore.posix import PosixSlab
from deepinfer_kvstore.tenants import tenant_tag
from deepinfer_kvstore.transfer import Transfer
from deepinfer_vllm.kv_connector.request import Prefix
from kv_connector.offline import PAYLOAD, TOKENS, WINDOW, Offline, keys

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Callable[..., Offline]]:
    """scheduler(rows=16, **extra): one engine's on a root that all of the test share; closed after it."""
    opened: list[Offline] = []

    def make(rows: int = 16, **extra: Any) -> Offline:
        opened.append(Offline.open(tmp_path / "root", rows, **extra))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_what_one_engine_stores_another_loads(scheduler: Callable[..., Offline]) -> None:
    blocks, window = keys(6), keys(6, WINDOW)[5:]
    first = scheduler()
    first.store(first.request("a", blocks, keys(6, WINDOW)), [*blocks, *window])
    first.settle()
    second = scheduler()
    request = second.request("b", blocks, keys(6, WINDOW))
    assert second.look(request, [*blocks, *window]) == [PENDING] * 7
    second.settle()
    assert second.look(request, [*blocks, *window]) == [HIT] * 7
    for key, row in zip(
        [*blocks, *window], second.manager.prepare_load([*blocks, *window], request).chunk_ids, strict=True
    ):
        assert (second.rows[row, :PAYLOAD] == key[1] + 1).all()
        assert not second.rows[row, PAYLOAD:].any(), "bytes past the payload are nobody's"


def test_the_index_is_asked_once_a_request_and_group(
    scheduler: Callable[..., Offline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waiting request looks all its keys up in every step."""
    blocks = keys(8)
    one = scheduler()
    one.store(one.request("a", blocks), blocks[:5])
    one.settle()
    other = scheduler(rows=40)
    asked: list[int] = []
    store = other.tier._store
    for name in ("longest_prefix", "contains"):
        method = getattr(store, name)
        monkeypatch.setattr(store, name, lambda found, method=method: (asked.append(len(found)), method(found))[1])
    request = other.request("b", blocks, keys(8, WINDOW))
    for _ in range(3):
        assert other.look(request, blocks)[5:] == [MISS] * 3
        other.settle()
    assert asked == [8]
    assert other.look(request, keys(8, WINDOW)[6:]) == [MISS, MISS]
    assert other.look(request, keys(8, WINDOW)[6:]) == [MISS, MISS]
    assert asked == [8, 1, 1]
    # the request grows by two blocks: the new ones are asked for
    more = keys(10)
    for number, key in enumerate(more):
        request.set_offload_key_position(key, (number + 1) * TOKENS)
    assert other.look(request, more)[8:] == [MISS, MISS]
    assert asked == [8, 1, 1, 2]


def test_a_request_says_whose_blocks_they_are_and_for_how_long(scheduler: Callable[..., Offline]) -> None:
    blocks = keys(3)
    one = scheduler()
    one.store(one.request("a", blocks, kvstore={"ttl_class": "chat", "tenant": "acme"}), blocks)
    one.settle()
    store = one.tier._store
    entries = store.index.get_many([one.tier._store_key(key) for key in blocks])
    assert {entry.tenant for entry in entries if entry} == {tenant_tag("acme")}
    assert {entry.ttl_class for entry in entries if entry} == {store.options.retention.numbers["chat"]}
    assert [entry.depth for entry in entries if entry] == [32, 64, 96]
    assert [entry.parent for entry in entries if entry] == [bytes(8), blocks[0][:8], blocks[1][:8]]


def test_garbage_in_a_request_is_counted(scheduler: Callable[..., Offline]) -> None:
    one = scheduler()
    one.request("a", keys(1), kvstore=[1])
    one.request("b", keys(1), kvstore={"ttl_class": {}, "x": 1})
    data = one.tier.get_stats().data["data"]
    assert data["vllm:deepinfer_kv_ignored_params"] == {(): 3}


def test_events_tell_of_what_is_stored(scheduler: Callable[..., Offline]) -> None:
    one = scheduler()
    one.store(one.request("a", keys(2)), keys(2))
    one.settle()
    (event,) = one.tier.take_events()
    assert (set(event.keys), event.medium, event.removed) == (set(keys(2)), Medium.STORAGE, False)
    assert not one.tier.take_events()


def test_a_request_id_used_again_has_its_own_transfers(scheduler: Callable[..., Offline]) -> None:
    """vllm#51637: what comes late for the first request of that name is not taken for the second one's."""
    one = scheduler()
    earlier, later = keys(3), keys(6, seed=1)[3:]
    one.store(one.request("a", earlier), earlier)
    one.store(one.request("b", keys(6, seed=1)), later)
    one.settle()
    other = scheduler()
    first = other.request("x", earlier)
    assert other.look(first, earlier) == [PENDING] * 3
    other.step()
    other.manager.on_request_finished(first)
    second = other.request("x", keys(6, seed=1))
    assert other.look(second, later) == [PENDING] * 3
    other.settle()
    assert other.look(second, later) == [HIT] * 3
    rows = other.manager.prepare_load(later, second).chunk_ids
    assert [{*other.rows[row, :PAYLOAD].tolist()} for row in rows] == [{4}, {5}, {6}]


def test_a_store_whose_copy_failed_is_published_nowhere(scheduler: Callable[..., Offline]) -> None:
    one = scheduler()
    request = one.request("a", keys(2))
    one.store(request, keys(2), fails=True)
    one.settle()
    assert one.tier._store.stats().stores == 0
    assert one.look(request, keys(2)) == [MISS, MISS]
    one.store(request, keys(2))  # and may be stored again
    one.settle()
    assert one.tier._store.stats().stores == 2


def test_a_block_that_cannot_be_loaded_is_asked_for_once(scheduler: Callable[..., Offline], tmp_path: Path) -> None:
    """vllm#49176"""
    blocks = keys(4)
    one = scheduler()
    one.store(one.request("a", blocks), blocks)
    one.settle()
    (slab,) = (tmp_path / "root").glob("*/slabs/*.slab")
    with slab.open("r+b") as file:
        file.seek(2 * 8192 + 17)
        file.write(b"\xff")
    other = scheduler()
    request = other.request("b", blocks)
    assert other.look(request, blocks) == [PENDING] * 4
    other.settle()
    for _ in range(3):
        assert other.look(request, blocks) == [HIT, HIT, MISS, HIT]
        other.step()
    data = other.tier.get_stats().data["data"]
    assert data["vllm:deepinfer_kv_checksum_failures"] == {(): 1}
    assert data["vllm:deepinfer_kv_hit_tokens"] == {(): 3 * TOKENS}
    assert data["vllm:deepinfer_kv_miss_tokens"] == {("failed",): TOKENS}


def test_rows_of_a_hanging_disk_are_nobodys(scheduler: Callable[..., Offline], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = keys(3)
    one = scheduler()
    one.store(one.request("a", blocks), blocks)
    one.settle()
    hangs, go_on = threading.Event(), threading.Event()
    read = PosixSlab.readv
    monkeypatch.setattr(PosixSlab, "read_fd", None)
    monkeypatch.setattr(PosixSlab, "readv", lambda *given: (hangs.set(), go_on.wait(), read(*given))[2])
    other = scheduler(rows=6)
    request = other.request("b", blocks)
    assert other.look(request, blocks) == [PENDING] * 3
    other.step()
    (job,) = other.tier._loads.values()
    assert hangs.wait(60)
    job.transfer.deadline = 0.0
    assert other.look(request, blocks) == [MISS] * 3
    assert other.look(other.request("c", blocks), blocks) == [MISS] * 3
    assert other.manager.prepare_store(keys(4, seed=9), request) is None  # three rows are free
    go_on.set()
    other.settle()
    assert not other.tier.captive and other.look(other.request("d", blocks), blocks) in ([HIT] * 3, [MISS] * 3)
    other.step()  # hits are held until their step ends
    assert other.manager.prepare_store(keys(6, seed=9), request) is not None


def test_memory_stays_mapped_while_a_disk_hangs(
    scheduler: Callable[..., Offline], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = keys(2)
    one = scheduler()
    one.store(one.request("a", blocks), blocks)
    one.settle()
    hangs, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(PosixSlab, "read_fd", None)
    monkeypatch.setattr(PosixSlab, "readv", lambda *_: (hangs.set(), go_on.wait()))
    monkeypatch.setattr("deepinfer_vllm.kv_connector.tier.SHUTDOWN_GRACE_SECONDS", 0.0)
    other = scheduler()
    other.look(other.request("b", blocks), blocks)
    other.step()
    assert hangs.wait(60)
    other.tier._store.options = replace(other.tier._store.options, io_timeout_s=0.05)  # what closing waits
    other.close()
    view = other.manager.primary_tier.get_kv_memoryview()
    assert view[0, 0] == 0, "released memory would raise"
    go_on.set()


def test_a_hit_stays_until_it_is_loaded(scheduler: Callable[..., Offline]) -> None:
    """vllm#54914: what a later group's promotions push out in the same step."""
    one = scheduler()
    one.store(one.request("a", keys(8, WINDOW)), keys(8, WINDOW))
    one.settle()
    other = scheduler(rows=6)
    old = other.request("old", keys(3))
    other.store(old, keys(3))
    other.settle()
    request = other.request("b", keys(3), keys(8, WINDOW))
    assert other.look(request, keys(3)) == [HIT] * 3
    assert other.look(request, keys(8, WINDOW)) == [PENDING] * 3 + [MISS] * 5
    other.manager.prepare_load(keys(3), request)


def test_a_preempted_request_finds_what_it_has_stored(scheduler: Callable[..., Offline]) -> None:
    blocks = keys(3)
    one = scheduler(rows=6)
    request = one.request("a", blocks)
    assert one.look(request, blocks) == [MISS] * 3
    one.store(request, blocks)
    one.settle()
    one.store(one.request("b", keys(6, seed=3)), keys(6, seed=3))
    one.settle()
    assert one.look(request, blocks) == [PENDING] * 3


def test_no_prompt_is_promoted_for_ever(scheduler: Callable[..., Offline]) -> None:
    """Of a prompt larger than host memory half of the rows come in, and rows that went are not brought again."""
    blocks = keys(10)
    one = scheduler()
    one.store(one.request("a", blocks), blocks)
    one.settle()
    other = scheduler(rows=8)
    request = other.request("b", blocks)
    assert other.look(request, blocks) == [PENDING] * 4 + [MISS] * 6
    other.settle()
    assert other.look(request, blocks[:5]) == [HIT] * 4 + [MISS]
    other.step()
    other.store(other.request("c", keys(8, seed=3)), keys(8, seed=3))
    other.settle()
    assert other.look(request, blocks) == [MISS] * 10


def test_uses_are_told_to_the_store(scheduler: Callable[..., Offline], monkeypatch: pytest.MonkeyPatch) -> None:
    one = scheduler()
    touched: list[Any] = []
    monkeypatch.setattr(one.tier._store, "touch", lambda *given: touched.append(given))
    request = one.request("a", keys(3), kvstore={"ttl_class": "chat"})
    one.manager.on_request_finished(request)
    assert touched == [([one.tier._store_key(key) for key in keys(3)], "chat")]


def test_metrics_have_definitions(scheduler: Callable[..., Offline]) -> None:
    one = scheduler()
    one.store(one.request("a", keys(3)), keys(3))
    one.settle()
    stats = one.tier.get_stats()
    definitions = one.tier.build_metric_definitions({})
    assert stats.data["data"].keys() <= definitions.keys()
    assert stats.data["data"]["vllm:deepinfer_kv_store_bytes"] == {(): 3 * PAYLOAD}
    assert stats.data["data"]["vllm:deepinfer_kv_used_bytes"] == {(): 3 * 8192}
    again = one.tier.get_stats().data["data"]
    assert {name.removeprefix("vllm:deepinfer_kv_") for name in again} == {
        "queue_depth", "used_bytes", "capacity_bytes", "degraded_roots",
    }  # fmt: skip


def test_draining_waits_for_every_transfer(scheduler: Callable[..., Offline]) -> None:
    one = scheduler()
    one.store(one.request("a", keys(5)), keys(5))
    one.manager.reset_cache()
    assert one.tier._store.stats().stores == 5
    assert one.look(one.request("b", keys(5)), keys(5)) in ([PENDING] * 5, [MISS] * 5)  # by vLLM's version
    one.settle()


def test_draining_waits_for_word_of_every_transfer(
    scheduler: Callable[..., Offline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer wakes who waits for it before it calls back; vLLM asserts that no job is left."""
    tell = Transfer.when_done
    monkeypatch.setattr(
        Transfer, "when_done", lambda self, callback: tell(self, lambda done: (time.sleep(0.1), callback(done))[1])
    )
    one = scheduler()
    one.store(one.request("a", keys(5)), keys(5))
    one.manager.reset_cache()
    assert not one.tier._stores


def test_half_of_a_character_is_a_tenant(scheduler: Callable[..., Offline]) -> None:
    """JSON can hold what UTF-8 cannot."""
    one = scheduler()
    one.store(one.request("a", keys(2), kvstore={"tenant": "\ud800"}), keys(2))
    one.settle()
    assert one.tier._store.stats().stores == 2


def test_rows_are_not_copied(scheduler: Callable[..., Offline]) -> None:
    one = scheduler()
    row = one.tier._row(np.int32(3))
    one.rows[3, 7] = 99
    assert len(row) == PAYLOAD and row[7] == 99


def test_more_blocks_than_rows_are_stored_in_part(scheduler: Callable[..., Offline]) -> None:
    """vLLM would refuse them in every step, and say so in each."""
    one = scheduler(rows=6)
    one.store(one.request("a", keys(10)), keys(10))
    one.settle()
    other = scheduler()
    assert other.look(other.request("b", keys(10)), keys(10)) == [PENDING] * 3 + [MISS] * 7


def test_absent_tokens_are_counted_once_however_often_they_are_looked_for(scheduler: Callable[..., Offline]) -> None:
    """A request that waits for another engine's blocks looks every few milliseconds."""
    one = scheduler()
    one.store(one.request("a", keys(2)), keys(2))
    one.settle()
    other = scheduler()
    request = other.request("b", keys(6))
    for _ in range(3):
        other.look(request, keys(6))
        Prefix.of(request).forget()
    other.look(request, keys(6))
    other.settle()
    other.manager.on_request_finished(request)
    assert other.tier.get_stats().data["data"]["vllm:deepinfer_kv_miss_tokens"] == {("absent",): 4 * TOKENS}


def test_what_was_dropped_is_offered_again_while_it_is_in_a_host_row(
    scheduler: Callable[..., Offline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the prefix that everybody uses, and that no row is taken from, would never be stored."""
    one = scheduler(rows=6)
    blocks = keys(3)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(PosixSlab, "writev", full)
        one.store(one.request("a", blocks), blocks)
        one.settle()
    assert one.tier.unstored == set(blocks) and one.tier._store.stats().stores == 0
    prepared = one.manager.prepare_store(blocks, one.request("b", blocks))
    assert prepared is not None and not prepared.keys_to_store
    one.settle()
    assert not one.tier.unstored and one.tier._store.stats().stores == 3
    with monkeypatch.context() as broken:
        broken.setattr(PosixSlab, "writev", full)
        one.store(one.request("c", keys(3, seed=1)), keys(3, seed=1))
        one.settle()
    assert len(one.tier.unstored) == 3
    one.store(one.request("d", keys(6, seed=2)), keys(6, seed=2))
    assert not one.tier.unstored  # their rows are others' now
    one.settle()
