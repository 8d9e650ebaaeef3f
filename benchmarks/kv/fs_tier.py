"""vLLM's own `fs` tier, made by its factory with its defaults and driven as its tiering manager drives it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kv.contender import Request, Rows


class FsTier:
    """One transfer job a request, as the manager makes them. A file a block, written and renamed, read by O_DIRECT."""

    def __init__(self, root: Path, rows: Rows) -> None:
        self._root, self._rows, self._jobs = root, rows, 0
        tier = {"type": "fs", "root_dir": str(root)}
        spec = TieringOffloadingSpec(_config(rows, tier))
        self._tier = SecondaryTierFactory.create_secondary_tier(tier, rows.view, spec)

    def store(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._tier.submit_store(self._job(request, request.rows, is_promotion=False))
        self._finish(len(requests))

    def load(self, requests: Sequence[Request]) -> None:
        for request in requests:
            rows = range(request.first_row + self._rows.blocks, request.rows.stop + self._rows.blocks)
            self._tier.submit_load(self._job(request, rows, is_promotion=True))
        self._finish(len(requests))

    def make_directories(self, requests: Sequence[Request]) -> None:
        """Those that the blocks' files will lie in, as a root has them that has seen a million blocks."""
        for request in requests:
            for block_hash in request.hashes:
                path = self._tier.file_mapper.get_file_name(make_offload_key(block_hash, 0))
                Path(path).parent.mkdir(parents=True, exist_ok=True)

    def files(self) -> list[Path]:
        return list(self._root.rglob("*.bin"))

    def close(self) -> None:
        self._tier.shutdown()

    def _job(self, request: Request, rows: range, *, is_promotion: bool) -> TransferJob:
        self._jobs += 1
        return TransferJob(
            job_id=self._jobs,
            keys=[make_offload_key(block_hash, 0) for block_hash in request.hashes],
            chunk_ids=np.arange(rows.start, rows.stop),
            is_promotion=is_promotion,
            req_context=ReqContext(req_id=request.hashes[0].hex()),
        )

    def _finish(self, jobs: int) -> None:
        self._tier.drain_jobs()
        results = list(self._tier.get_finished_jobs())
        if len(results) != jobs or not all(result.success for result in results):
            raise RuntimeError(f"fs tier: {sum(result.success for result in results)} of {jobs} jobs succeeded")


def _config(rows: Rows, tier: dict[str, str]) -> OffloadingConfig:
    """Of one rank that offloads rows of that size."""
    one_rank = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=128, layer_names=("kv",), group_id=0),),
        worker_kv_bytes_per_block=rows.payload_bytes,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": rows.view.nbytes, "secondary_tiers": [tier]},
        engine_id="benchmark",
        model=OffloadingModelConfig(name="benchmark", dtype="uint8"),
        cache=OffloadingCacheConfig(tokens_per_hash=128, blocks_per_chunk=1),
        parallel=one_rank,
    )
