"""Copies between a device's blocks and host rows, beside those of the CPU's worker.

The caches here are the host's, which has no events: a `Moment` stands for a device's, and can be held back. On a device
that is not the host the same is compared in `tests/npu/worker_cases.py`.
"""

import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from deepinfer_vllm.kv_connector.cpu_worker import CpuOffloadingWorker
from deepinfer_vllm.kv_connector.device_worker import DeviceOffloadingWorker
from kv_connector.block_copies import BLOCKS, CHUNKS, PAGES, Worker, caches, pages, workers

JOBS = 12


class Moment:
    """An event of a device that has come to it when `arrived` is set."""

    arrived = threading.Event()
    recorded: list[torch.device] = []
    error: Exception | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self) -> None:
        self.recorded.append(self.device)

    def synchronize(self) -> None:
        self.arrived.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Moment]]:
    """A class of its own for each test, which holds nothing back after it."""

    class Own(Moment):
        arrived, recorded = threading.Event(), []

    Own.arrived.set()
    monkeypatch.setattr(torch, "Event", Own)
    yield Own
    Own.arrived.set()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with workers(DeviceOffloadingWorker) as make:
        yield make


def draw(drawn: Random, per_chunk: int) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    """Blocks of either group or both, which begin and end anywhere in a chunk, and host rows for them."""
    counts = drawn.choice([(drawn.randint(1, 4), drawn.randint(1, 3)), (drawn.randint(1, 4), 0), (0, 3)])
    first = [drawn.randint(0, 5), drawn.randint(0, 5)]
    blocks = [block for count in counts for block in drawn.sample(range(BLOCKS), count)]
    chunks = sum(-(-(index % per_chunk + n) // per_chunk) for index, n in zip(first, counts, strict=True) if n)
    return GPULoadStoreSpec(blocks, counts, first), CPULoadStoreSpec(drawn.sample(range(CHUNKS), chunks))


def memory(kv_caches: CanonicalKVCaches) -> list[list[list[int]]]:
    """All bytes of the caches, those between pages too."""
    wide = [each.tensor.as_strided((BLOCKS, each.tensor.stride(0)), each.tensor.stride()) for each in kv_caches.tensors]
    return [rows.cpu().tolist() for rows in wide]


def assert_copies_as_the_cpu_worker(device: str, per_chunk: int) -> None:
    """After each of some stores and loads: the same results, host rows and caches, byte by byte."""
    drawn = Random(per_chunk)
    here, there = caches(1), caches(1, device)
    with workers() as make:
        cpu = make(here, per_chunk, f"alike-cpu-{per_chunk}", kind=CpuOffloadingWorker)
        own = make(there, per_chunk, f"alike-{device}-{per_chunk}", kind=DeviceOffloadingWorker)
        for job in range(JOBS):
            blocks, chunks = draw(drawn, per_chunk)
            done = []
            for each in (cpu, own):
                if job % 3 < 2:
                    assert each.submit_store(job, blocks, chunks)
                else:
                    assert each.submit_load(job, chunks, blocks)
                each.wait({job})
                done.append([(r.job_id, r.success, r.transfer_size) for r in each.get_finished()])
            assert done[0] == done[1] and done[0][0][:2] == (job, True)
            assert cpu._region.mmap_obj[:] == own._region.mmap_obj[:], job
            assert memory(here) == memory(there), job
    assert memory(there) != memory(caches(1))


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_every_byte_as_the_cpu_worker(moment: type[Moment], per_chunk: int) -> None:
    """Groups of several tensors and of a part of one, strided caches, chunks begun and ended in part."""
    assert_copies_as_the_cpu_worker("cpu", per_chunk)
    assert moment.recorded == [torch.device("cpu")] * JOBS


def submit(one: CpuOffloadingWorker, job: int, *, store: bool, block: int = 4, chunk: int = 2) -> None:
    blocks, chunks = GPULoadStoreSpec([block], [1, 0], [0, 0]), CPULoadStoreSpec([chunk])
    assert one.submit_store(job, blocks, chunks) if store else one.submit_load(job, chunks, blocks)


def row(one: CpuOffloadingWorker, chunk: int) -> bytes:
    memory: Any = one._region.mmap_obj
    size = len(memory) // CHUNKS
    return bytes(memory[chunk * size : chunk * size + sum(PAGES)])


def test_a_store_waits_for_the_step_that_writes_its_blocks(worker: Worker, moment: type[Moment]) -> None:
    """The moment is taken as the job is submitted, and the pages are read once it has come."""
    cache = caches(1)
    one = worker(cache, 1, "writes")
    moment.arrived.clear()
    submit(one, 1, store=True)
    assert len(moment.recorded) == 1
    waiting = threading.Thread(target=one.wait, args=({1},))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and one.get_finished() == [] and not any(row(one, 2))
    for tensor in cache.tensors:
        tensor.tensor[4] = 77  # the step's end
    moment.arrived.set()
    waiting.join()
    assert row(one, 2) == bytes([77]) * sum(PAGES)


def test_a_load_waits_for_the_step_that_still_reads_its_blocks(worker: Worker, moment: type[Moment]) -> None:
    cache = caches(1)
    one = worker(cache, 1, "reads")
    submit(one, 1, store=True, block=9)
    one.wait({1})
    before = pages(cache, 0, 4)
    moment.arrived.clear()
    submit(one, 2, store=False)
    waiting = threading.Thread(target=one.wait, args=({2},))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and pages(cache, 0, 4) == before
    moment.arrived.set()
    waiting.join()
    assert pages(cache, 0, 4) == pages(cache, 0, 9) != before


def test_what_fails_is_a_result(worker: Worker, moment: type[Moment]) -> None:
    """A copy, and then the device itself: each is told, moves no more, and the next job is done."""
    one = worker(caches(1), 1, "fails")
    whole, one._caches[1] = one._caches[1], one._caches[1][:, :8]  # pages of another size than the host's
    submit(one, 1, store=True)
    one.wait({1})
    one._caches[1] = whole
    moment.error = RuntimeError("the device is lost")
    submit(one, 2, store=True, chunk=3)
    one.wait({2})
    moment.error = None
    submit(one, 3, store=True, chunk=5)
    one.wait({3})
    results = [(r.job_id, r.success, r.transfer_size) for r in one.get_finished()]
    assert results == [(1, False, PAGES[0]), (2, False, 0), (3, True, sum(PAGES))]
    assert not any(row(one, 3)) and row(one, 5) == b"".join(pages(caches(1), 0, 4))


def test_what_was_submitted_is_finished_before_it_ends(worker: Worker, moment: type[Moment]) -> None:
    one = worker(caches(1), 1, "ends")
    moment.arrived.clear()
    submit(one, 1, store=True)
    threading.Timer(0.05, moment.arrived.set).start()
    one.shutdown()
    one.shutdown()
    assert [(r.job_id, r.success) for r in one.get_finished()] == [(1, True)]
