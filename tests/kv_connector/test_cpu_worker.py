"""Copies between engine blocks and host rows without an accelerator."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kv_connector.block_copies import BLOCKS, CHUNKS, PAGES, Worker, caches, pages, workers


@pytest.fixture
def worker() -> Iterator[Worker]:
    with workers() as make:
        yield make


@pytest.mark.parametrize(("per_chunk", "index"), [(1, 0), (1, 5), (2, 0), (2, 1), (3, 4)])
def test_what_is_stored_is_loaded(worker: Worker, per_chunk: int, index: int) -> None:
    first, second = caches(1), caches(2)
    untouched = caches(2)
    taken = {0: [3, 7, 1, 10], 1: [0, 11]}
    given = {0: [8, 2, 9, 4], 1: [5, 6]}
    indices = [index, 1]
    chunks, number = [], 0
    for group, blocks in taken.items():
        count = -(-(indices[group] % per_chunk + len(blocks)) // per_chunk)
        chunks += list(range(number, number + count))
        number += count
    chunks = [(7 * chunk + 3) % CHUNKS for chunk in chunks]

    def spec(blocks: dict[int, list[int]]) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(blocks[0] + blocks[1], [len(blocks[0]), len(blocks[1])], indices)

    engine_id = f"test-{per_chunk}-{index}"
    a, b = worker(first, per_chunk, engine_id), worker(second, per_chunk, engine_id)
    assert a.submit_store(1, spec(taken), CPULoadStoreSpec(chunks))
    a.wait({1})
    assert b.submit_load(2, CPULoadStoreSpec(chunks), spec(given))
    b.wait({2})
    moved = 4 * sum(PAGES) + 2 * 72
    for done, job in ((a.get_finished(), 1), (b.get_finished(), 2)):
        assert [(r.job_id, r.success, r.transfer_size) for r in done] == [(job, True, moved)]
    assert a.get_finished() == []
    for group in taken:
        for source, target in zip(taken[group], given[group], strict=True):
            assert pages(second, group, target) == pages(first, group, source)
    for block in set(range(BLOCKS)) - set(given[0]) - set(given[1]):
        assert pages(second, 0, block) == pages(untouched, 0, block)


def test_ranks_fill_their_own_part_of_a_row(worker: Worker) -> None:
    ranks = [caches(1), caches(2)]
    workers = [worker(cache, 1, "test-ranks", rank, 2) for rank, cache in enumerate(ranks)]
    for each in workers:
        each.submit_store(0, GPULoadStoreSpec([4], [1, 0], [0, 0]), CPULoadStoreSpec([6]))
        each.wait({0})
    whole = np.frombuffer(workers[0]._region.mmap_obj, dtype=np.int8).reshape(CHUNKS, -1)[6].tobytes()
    assert whole[: 2 * sum(PAGES)] == b"".join(b"".join(pages(cache, 0, 4)) for cache in ranks)
    assert not any(whole[2 * sum(PAGES) :])


def test_a_copy_that_fails_is_a_result(worker: Worker) -> None:
    """A worker's failure is told, and it goes on with the next job."""
    cache = caches(1)
    one = worker(cache, 1, "test-failure")
    one._caches[1] = one._caches[1][:, :8]  # pages of another size than the host's
    block = GPULoadStoreSpec([4], [1, 0], [0, 0])
    one.submit_store(7, block, CPULoadStoreSpec([2]))
    one.submit_store(8, GPULoadStoreSpec([4], [0, 1], [0, 0]), CPULoadStoreSpec([3]))
    one.wait({7, 8})
    assert [(r.job_id, r.success) for r in one.get_finished()] == [(7, False), (8, True)]


def test_waiting_is_for_the_jobs_named(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence before blocks are written again: vllm#45704, vllm#54914."""
    one = worker(caches(1), 1, "test-wait")
    started, go_on = threading.Event(), threading.Event()
    copy = np.copyto

    def held(destination: object, source: object) -> None:
        started.set()
        go_on.wait()
        copy(destination, source)

    monkeypatch.setattr(np, "copyto", held)
    one.submit_store(1, GPULoadStoreSpec([4], [1, 0], [0, 0]), CPULoadStoreSpec([2]))
    started.wait()
    one.wait({5, 6})  # not on their way
    assert one.get_finished() == []
    waiting = threading.Thread(target=one.wait, args=({1},))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    go_on.set()
    waiting.join()
    assert [r.job_id for r in one.get_finished()] == [1]
