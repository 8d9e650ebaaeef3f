"""The connector: vLLM's offloading through host memory, with the store below it."""

import math
from copy import copy
from time import sleep
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from deepinfer_vllm import compat
from deepinfer_vllm.kv_connector.config import SPEC, TIER, ConnectorConfig
from deepinfer_vllm.kv_connector.handover_connector import HandoverConnector
from deepinfer_vllm.kv_connector.layout import describe
from deepinfer_vllm.kv_connector.request import refused
from deepinfer_vllm.kv_connector.settle import settle
from deepinfer_vllm.kv_connector.transfers import StoreConnectorWorker, TransferReport

OffloadingSpecFactory.register_spec(SPEC, "deepinfer_vllm.kv_connector.spec", SPEC)
SecondaryTierFactory.register_tier(TIER, "deepinfer_vllm.kv_connector.tier", TIER)


YIELD_SECONDS = 0.0001
"""More than a thread takes to wake up."""


class DeepInfer3FSConnector(HandoverConnector):
    """One object in the scheduler's process, one in each rank's."""

    connector_worker: Any

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        settle(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self._describe(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._replays = any(group.kv_cache_spec.prefix_replay_tokens > 0 for group in groups)
        if self.connector_worker is not None:
            if vllm_config.use_v2_model_runner:
                compat.flush_before_zeroing()
            self.connector_worker = StoreConnectorWorker(self.connector_worker.spec, vllm_config, kv_cache_config)

    @staticmethod
    def _describe(vllm_config: Any, kv_cache_config: Any) -> None:
        """Tell the tier, which vLLM makes and gives no more than its own configuration, whose blocks they are."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        offloading = build_offloading_config(vllm_config, kv_cache_config)
        weights = ConnectorConfig.parse(extra).weights
        descriptor, schemas = describe(vllm_config, kv_cache_config, offloading, weights=weights)
        extra["secondary_tiers"] = [{"type": TIER, "descriptor": descriptor.to_json(), "schemas": schemas}]

    def _max_loadable_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """vLLM's, and no further than whole blocks where it replays windows: it would cut the hit to them after windows
        have been looked for at its end, and load windows that are not there."""
        bound: int | None = super()._max_loadable_tokens(request, num_computed_tokens)
        if not self.scheduler._sliding_window_groups or not self._replays:
            return bound
        block: int = math.lcm(*(group.tokens_per_chunk for group in self.scheduler.config.kv_group_configs))
        whole: int = (request.num_tokens - 1) // block * block
        # One more, for vLLM takes the last token of what it may load off again.
        mine = max(0, whole + 1 - num_computed_tokens)
        return mine if bound is None else min(bound, mine)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """A rank's finished transfers, with the requests that must be computed because their load failed."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self.connector_worker.failed_loads
        self.connector_worker.failed_loads = set()
        return results

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """vLLM's. It asserts that no preempted request loads, yet one that was preempted before the step began,
        as `reset_prefix_cache` does it, may be taken up again in it. Such a request has no stores to wait for.

        A step that runs nothing gives the interpreter away. An engine in its caller's process steps on without a
        pause while its requests wait for the store. Each time that it lets the interpreter go, in calls into C, it has
        it back before a thread has woken up, and never keeps it for the 5 ms after which it would have to share: the
        store's threads would not come to read at all. vLLM's own loop, of an engine in its own process, sleeps.
        """
        if not scheduler_output.total_num_scheduled_tokens:
            sleep(YIELD_SECONDS)
        preempted = scheduler_output.preempted_req_ids or set()
        if again := {request_id for request_id in preempted if self._loads(request_id)}:
            scheduler_output = copy(scheduler_output)
            scheduler_output.preempted_req_ids = preempted - again
        return super().build_connector_meta(scheduler_output)

    def _loads(self, request_id: str) -> bool:
        status = self.scheduler._req_status.get(request_id)
        return status is not None and any(not self.scheduler._jobs[job].is_store for job in status.transfer_jobs)

    def update_connector_output(self, connector_output: Any) -> None:
        """Tell the manager which copies failed, before vLLM completes their jobs."""
        report = connector_output.kv_connector_worker_meta
        for job_id in report.failed_jobs if isinstance(report, TransferReport) else ():
            if (job := self.scheduler._jobs.get(job_id)) is None:
                continue  # from before a reset of the cache
            if job.is_store:
                self.scheduler.manager.fail_store(job.keys)
            else:
                refused(self.scheduler._req_status[job.req_id].req_context).update(job.keys)
        super().update_connector_output(connector_output)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any) -> KVConnectorPromMetrics:
        """The API server's side of the metrics; see vLLM."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        ConnectorConfig.parse(extra).complete(extra)
        return super().build_prom_metrics(vllm_config, *args)
