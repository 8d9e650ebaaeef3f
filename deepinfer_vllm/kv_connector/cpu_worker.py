"""Copies between the engine's KV blocks and host rows where there is no accelerator: one thread, plain memory copies.

vLLM's own worker needs streams, events and pinned memory, which CPUs have not.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from deepinfer_vllm.kv_connector.shared_region import close_region

logger = init_logger("vllm." + __name__)


class CpuOffloadingWorker(OffloadingWorker):
    """Moves blocks on a thread of its own, in the order in which they were submitted.

    A forward pass on a CPU has written its blocks when it returns, and vLLM submits a store after the step that wrote
    them, so no more ordering is needed; `wait` is the fence before blocks are written again. Owns `region`.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        """A host row holds the chunk's blocks, tensor after tensor, as vLLM's own worker lays them out."""
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._caches: list[Any] = []
        self._host: list[Any] = []
        for cache in kv_caches.tensors:
            page = cache.page_size_bytes
            host = region.create_next_worker_view(page * blocks_per_chunk)
            self._caches.append(self._rows(cache.tensor, page))
            self._host.append(
                self._rows(host, page * blocks_per_chunk).reshape(region.num_chunks, blocks_per_chunk, page)
            )
        self._refs = [[(ref.tensor_idx, ref.page_size_bytes) for ref in group] for group in kv_caches.group_data_refs]
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._finished: list[TransferResult] = []
        self._thread = threading.Thread(target=self._run, name="deepinfer-kv-copy", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Engine blocks to host rows."""
        return self._submit(job_id, src_spec, dst_spec, store=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Host rows to engine blocks. `expedited` (vLLM 0.33) asks for no queueing behind others; here all do."""
        return self._submit(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """What has finished since the last call; a copy that failed is a result without success."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return once none of these is on its way."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending.isdisjoint(job_ids))

    def shutdown(self) -> None:
        """Finish what was submitted, then release the region. Idempotent."""
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._thread.join()
        self._host.clear()
        close_region(self._region)

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, *, store: bool) -> bool:
        assert isinstance(chunks, BlockIDsLoadStoreSpec)
        with self._changed:
            self._pending.add(job_id)
        self._queue.put((job_id, self._fence(), list(self._copies(blocks, chunks.block_ids, store=store))))
        return True

    def _copies(self, blocks: GPULoadStoreSpec, chunk_ids: Any, *, store: bool) -> "Iterator[_Copy]":
        """Destination and source of every page of a job. A group's first and last chunk may take part in part."""
        per_chunk = self._blocks_per_chunk
        first_block = first_chunk = 0
        for refs, count, index in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            if not count:
                continue
            skipped = index % per_chunk
            for number in range(count):
                block = blocks.block_ids[first_block + number]
                chunk, part = divmod(skipped + number, per_chunk)
                for tensor, page_bytes in refs:
                    engine = self._caches[tensor][block, :page_bytes]
                    host = self._host[tensor][chunk_ids[first_chunk + chunk], part, :page_bytes]
                    yield (host, engine) if store else (engine, host)
            first_block += count
            first_chunk += -(-(skipped + count) // per_chunk)
        assert first_block == len(blocks.block_ids) and first_chunk == len(chunk_ids)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job_id, wait, copies = job
            started, moved, success = perf_counter(), 0, True
            try:
                wait()
                for destination, source in copies:
                    moved += self._copy(destination, source)
            except Exception:
                logger.exception("Copying KV blocks failed (job %d): the blocks count as missing", job_id)
                success = False
            with self._changed:
                self._pending.discard(job_id)
                self._finished.append(TransferResult(job_id, success, moved, perf_counter() - started))
                self._changed.notify_all()

    def _rows(self, tensor: torch.Tensor, row_bytes: int) -> Any:
        """The memory of `tensor`, [rows, row_bytes] int8, which may be strided."""
        rows = tensor.view(torch.int8)
        assert rows.device.type == "cpu" and rows.shape[1] == row_bytes
        return rows.numpy()

    def _fence(self) -> Callable[[], None]:
        """Called as a job is submitted; what it returns waits until the job's blocks may be touched."""
        return lambda: None

    def _copy(self, destination: Any, source: Any) -> int:
        """One page; its bytes."""
        np.copyto(destination, source)
        return int(source.nbytes)


_Copy = tuple[Any, Any]
"""Destination and source: pages of `_rows`."""
_Job = tuple[int, Callable[[], None], list[_Copy]]
"""Its id, what to wait for, its pages."""
