"""vLLM's offloading connector, which also keeps windows where turns end: as blocks or, of some models, as snapshots."""

from dataclasses import dataclass, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger

from deepinfer_vllm.kv_connector.config import ConnectorConfig
from deepinfer_vllm.kv_connector.metrics import Growth, Sums
from deepinfer_vllm.kv_connector.snapshot_service import SnapshotService
from deepinfer_vllm.kv_connector.snapshots import SnapshotScheduler
from deepinfer_vllm.kv_connector.transfers import TransferReport
from deepinfer_vllm.kv_connector.turn_ends import TurnEnds, retire_later
from deepinfer_vllm.kv_connector.windows import WindowCopies, WindowPlan, Windows

logger = init_logger("vllm." + __name__)


@dataclass
class PlanWithWindows(OffloadingConnectorMetadata):
    """vLLM's plan of a step, with the snapshots to take and to load."""

    windows: WindowPlan | None = None


class SnapshotConnector(OffloadingConnector):
    """Snapshots are taken where `swa_bytes` are given and the model has windows that a hit computes again."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = ConnectorConfig.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._windows = Windows.of(kv_cache_config) if config.swa_bytes else None
        self._snapshots: SnapshotScheduler | None = None
        self._service: SnapshotService | None = None
        self._growth = Growth()
        self._at_most: int | None = None
        self._tokens_ahead = 2 * (1 + vllm_config.num_speculative_tokens)
        """How far scheduling may run ahead of the tokens that a request ends with."""
        self._max_model_len = vllm_config.model_config.max_model_len
        # of a rank
        self._copies: WindowCopies | None = None
        self._takes_snapshots = vllm_config.parallel_config.rank == 0
        self._taken: dict[bytes, bytes] = {}
        self._sent: set[str] = set()
        self._failed: set[str] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._turn_ends = TurnEnds(self.scheduler)
        if self._windows is not None and role == KVConnectorRole.SCHEDULER:
            self._service = SnapshotService(config, vllm_config.parallel_config.data_parallel_index)
            [tier] = self.scheduler.manager.secondary_tiers
            self._snapshots = SnapshotScheduler(
                self._windows,
                self._service.ring,
                tier.descriptor.digest(),
                self.scheduler.config.tokens_per_hash,
                exchange=self._service.exchange,
                wait_seconds=config.swa_wait_s,
            )

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """vLLM's hook: here windows are told to stay until their turn ends."""
        super().bind_kv_cache_manager(kv_cache_manager)
        tokens = self._turn_ends.kept_longer()
        if self._snapshots is not None:
            tokens |= self._snapshots.kept_longer()
        ahead = {group: count + self._tokens_ahead for group, count in tokens.items()}
        if not retire_later(kv_cache_manager, ahead, self._max_model_len):
            logger.warning_once("Windows where turns end are not kept: the longest request takes all KV memory")

    def on_new_request(self, request: Any) -> None:
        """vLLM's hook: a request has come."""
        super().on_new_request(request)
        if self._snapshots is not None:
            self._snapshots.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's answer, cut to where a snapshot lies if one is near its end."""
        found, loads = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._snapshots is None or not found:
            return found, loads
        # Asked first: a snapshot that comes while none is found would otherwise be neither found nor waited for.
        may_come = self._snapshots.waits(request.request_id)
        boundary = self._snapshots.choose(request, num_computed_tokens, num_computed_tokens + found)
        if boundary is None and may_come:
            return None, False
        if boundary is None or boundary == num_computed_tokens + found:
            return found, loads
        self._at_most = boundary - num_computed_tokens
        try:
            found, loads = super().get_num_new_matched_tokens(request, num_computed_tokens)
        finally:
            self._at_most = None
        if found != boundary - num_computed_tokens:
            self._snapshots.forget(request.request_id)
        return found, loads

    def _max_loadable_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        bounds = [super()._max_loadable_tokens(request, num_computed_tokens), self._at_most]
        return min((bound for bound in bounds if bound is not None), default=None)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """The groups whose rows a load brings: those of the windows too if a snapshot does."""
        loaded = super().get_loaded_kv_cache_group_ids(request)
        if self._snapshots is None or self._windows is None or not self._snapshots.loads(request.request_id):
            return tuple(loaded)
        return (*loaded, *(group.group for group in self._windows.groups))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM's hook: a request has its blocks."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._snapshots is not None:
            self._snapshots.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> OffloadingConnectorMetadata:
        """The plan of a step."""
        plan = super().build_connector_meta(scheduler_output)
        if self._snapshots is None:
            return plan
        self._snapshots.scheduled(scheduler_output)
        if (windows := self._snapshots.take_plan()) is None:
            return plan
        return PlanWithWindows(**{field.name: getattr(plan, field.name) for field in fields(plan)}, windows=windows)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the ranks report of a step."""
        report = connector_output.kv_connector_worker_meta
        if self._snapshots is not None:
            self._snapshots.failed(set(connector_output.failed_recving or ()))
            if isinstance(report, TransferReport):
                self._snapshots.captured(report.snapshots)
        super().update_connector_output(connector_output)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step on though no request runs."""
        return bool(super().has_pending_push_work()) or (self._snapshots is not None and self._snapshots.pending())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's hook: a request ends. Its blocks are kept until its snapshot is taken."""
        keep, answer = super().request_finished_all_groups(request, block_ids)
        self._turn_ends.finished(request)
        return keep or (self._snapshots is not None and self._snapshots.finished(request, block_ids)), answer

    def get_kv_connector_stats(self) -> Any:
        """vLLM's counts since the last call, and ours."""
        stats = super().get_kv_connector_stats()
        own = self._growth.take(self._sums())
        if stats is None:
            return None if own.is_empty() else own
        stats.aggregate(own)
        return stats

    def _sums(self) -> Sums:
        counts = self._service.counts() if self._service is not None else {}
        return {("snapshots", (event,)): count for event, count in counts.items()}

    def shutdown(self) -> None:
        """vLLM's hook: the engine ends."""
        if self._service is not None:
            self._service.close()
        super().shutdown()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's hook where another connector beside this one knows one group only."""
        return self.request_finished_all_groups(request, (block_ids,))

    # A rank's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's hook: the caches' memory."""
        super().register_kv_caches(kv_caches)
        if self._windows is not None:
            self._copies = WindowCopies(self._windows, kv_caches, self._kv_cache_config.num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """vLLM's hook, once a step."""
        super().start_load_kv(forward_context, **kwargs)
        plan = self._connector_metadata
        if self._copies is None or not isinstance(plan, PlanWithWindows) or plan.windows is None:
            return
        for capture in plan.windows.captures:
            self._sent.add(capture.request_id)
            if self._takes_snapshots:
                self._taken[capture.key] = self._copies.capture(capture.blocks)
        for restore in plan.windows.restores:
            if not self._copies.restore(restore.blocks, restore.payload):
                self._failed.add(restore.request_id)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """vLLM's hook: what has ended in this step."""
        results = super().get_transfer_results(finished_req_ids)
        results.finished_sending |= self._sent
        results.failed_recving |= self._failed
        self._sent, self._failed = set(), set()
        return results

    def build_connector_worker_meta(self) -> Any:
        """vLLM's report of a rank, with the snapshots that it took."""
        report = super().build_connector_worker_meta()
        if not self._taken:
            return report
        report = TransferReport() if report is None else report
        report.snapshots, self._taken = self._taken, {}
        return report
