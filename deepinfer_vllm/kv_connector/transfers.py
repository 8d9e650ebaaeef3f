"""Copies that fail between the engine and the host rows: told to the scheduler instead of ending the engine."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult


@dataclass
class TransferReport(OffloadingWorkerMetadata):
    """vLLM's report of a rank, with the jobs among the finished whose copy failed, and the snapshots it took by key."""

    failed_jobs: set[int] = field(default_factory=set)
    snapshots: dict[bytes, bytes] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "TransferReport":
        """The report of several ranks: a job has failed where one rank's copy has."""
        whole = super().aggregate(other)
        failed = self.failed_jobs | getattr(other, "failed_jobs", set())
        snapshots = self.snapshots | getattr(other, "snapshots", {})
        return TransferReport(whole.completed_jobs, whole.transfer_stats, failed, snapshots)


class FailuresAside:
    """A worker whose failed copies are kept aside: vLLM asserts that there are none. The rest is the worker's."""

    def __init__(self, worker: OffloadingWorker) -> None:
        self._worker = worker
        self.failed: set[int] = set()

    def get_finished(self) -> list[TransferResult]:
        """What has finished since the last call, failed copies as finished ones without bytes."""
        finished = self._worker.get_finished()
        self.failed.update(result.job_id for result in finished if not result.success)
        return [result if result.success else TransferResult(result.job_id, True) for result in finished]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


class StoreConnectorWorker(OffloadingConnectorWorker):
    """A rank's side. `failed_loads`: requests whose load has ended in failure since this was last taken."""

    worker: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.failed_loads: set[str] = set()
        self._failed_jobs: set[int] = set()

    def _init_worker(self, kv_caches: CanonicalKVCaches) -> None:
        super()._init_worker(kv_caches)
        self.worker = FailuresAside(self.worker)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """vLLM's."""
        loading = dict(self._load_jobs)
        finished: tuple[set[str], set[str]] = super().get_finished(finished_req_ids)
        failed, self.worker.failed = self.worker.failed, set()
        self._failed_jobs |= failed
        self.failed_loads.update(loading[job] for job in failed if job in loading)
        return finished

    def build_connector_worker_meta(self) -> TransferReport | None:
        """vLLM's report, and which copies failed."""
        if (report := super().build_connector_worker_meta()) is None:
            return None
        failed, self._failed_jobs = self._failed_jobs, set()
        return TransferReport(report.completed_jobs, report.transfer_stats, failed)
