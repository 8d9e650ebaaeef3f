"""What the tests of workers that copy KV blocks share: caches, workers on them, and their pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from deepinfer_vllm.kv_connector.cpu_worker import CpuOffloadingWorker

BLOCKS, CHUNKS = 12, 8
PAGES = (96, 40)
"""Page bytes of two tensors: the first group's layers have one in each, the second's uses 72 bytes of the first's."""

Worker = Callable[..., CpuOffloadingWorker]


def caches(seed: int, device: str = "cpu") -> CanonicalKVCaches:
    """Random pages; the second tensor's lie apart, as in packed layouts (vllm#53607)."""
    drawn = torch.Generator().manual_seed(seed)
    packed = torch.randint(-128, 128, (BLOCKS, PAGES[1] + 24), dtype=torch.int8, generator=drawn)
    tensors = [
        torch.randint(-128, 128, (BLOCKS, PAGES[0]), dtype=torch.int8, generator=drawn).to(device),
        packed.to(device)[:, : PAGES[1]],
    ]
    groups = [
        [CanonicalKVCacheRef(0, PAGES[0]), CanonicalKVCacheRef(1, PAGES[1])],
        [CanonicalKVCacheRef(0, 72)],
    ]
    return CanonicalKVCaches([CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors], groups)


@contextmanager
def workers(kind: type[CpuOffloadingWorker] = CpuOffloadingWorker) -> Iterator[Worker]:
    """worker(caches, blocks_per_chunk, engine_id, rank=0, ranks=1, kind=kind): regions are removed at the end."""
    made: list[CpuOffloadingWorker] = []

    def make(
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        engine_id: str,
        rank: int = 0,
        ranks: int = 1,
        kind: type[CpuOffloadingWorker] = kind,
    ) -> CpuOffloadingWorker:
        row = -(-sum(PAGES) * blocks_per_chunk * ranks // 4096) * 4096
        name = f"{engine_id}-{os.getpid()}"  # all who run tests on a machine have one /dev/shm
        region = SharedOffloadRegion(name, CHUNKS, rank, row, sum(PAGES) * blocks_per_chunk)
        made.append(kind(kv_caches, blocks_per_chunk, region))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.shutdown()


def pages(kv_caches: CanonicalKVCaches, group: int, block: int) -> list[bytes]:
    """A block's pages in the tensors of a group."""
    refs = kv_caches.group_data_refs[group]
    return [kv_caches.tensors[r.tensor_idx].tensor[block, : r.page_size_bytes].numpy().tobytes() for r in refs]
