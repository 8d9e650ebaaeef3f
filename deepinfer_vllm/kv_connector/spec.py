"""vLLM's tiered offloading with our host region, our manager and, where vLLM's copies do not go, ours."""

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_vllm.kv_connector.cpu_worker import CpuOffloadingWorker
from deepinfer_vllm.kv_connector.device_worker import DeviceOffloadingWorker
from deepinfer_vllm.kv_connector.manager import StoreOffloadingManager
from deepinfer_vllm.kv_connector.shared_region import (
    OURS,
    close_region,
    hold_region,
    remove_dead_regions,
    unlink_region,
)

LEAST_ROWS = 4


class StoreOffloadingSpec(TieringOffloadingSpec):
    """One object in each process of an engine; the scheduler's makes the manager, a rank's the worker."""

    _worker: OffloadingWorker | None
    _manager: OffloadingManager | None

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._engine_id = OURS + config.engine_id
        if self.num_chunks < LEAST_ROWS:
            raise StoreConfigError(
                f"cpu_bytes_to_use is {self.extra_config['cpu_bytes_to_use']}, a block takes {self.kv_bytes_per_chunk}:"
                f" at least {LEAST_ROWS} must fit, better several of the longest prompts"
            )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """vLLM's own worker on the accelerators that it knows, ours on CPUs and on platforms out of its tree."""
        if not self._worker:
            remove_dead_regions()
            if current_platform.is_cpu():
                self._worker = self._own_worker(CpuOffloadingWorker, kv_caches)
            elif current_platform.is_out_of_tree():
                self._worker = self._own_worker(DeviceOffloadingWorker, kv_caches)
            else:
                self._worker = super().get_worker(kv_caches)
                hold_region(self._worker._mmap_region)
        return self._worker

    def _own_worker(self, kind: type[CpuOffloadingWorker], kv_caches: CanonicalKVCaches) -> CpuOffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            hold_region(region)
            return kind(kv_caches, self.blocks_per_chunk, region)
        except BaseException:
            close_region(region)
            raise

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side. vLLM makes it once every rank has mapped the region, whose name is not needed then."""
        if not self._manager:
            made = super().get_manager()
            hold_region(self._scheduler_mmap)
            unlink_region(self._scheduler_mmap)
            self._manager = StoreOffloadingManager(made.primary_tier, made.secondary_tiers)
        return self._manager
