"""vLLM's tiering manager, taught that copies fail, that disks hang, and that prompts may outgrow host memory."""

from collections.abc import Collection, Container, Iterable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, PrepareStoreOutput, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from deepinfer_vllm.kv_connector.request import Refused
from deepinfer_vllm.kv_connector.tier import StoreTier

logger = init_logger("vllm." + __name__)


MOST_AGAIN = 256
"""Dropped blocks that a request offers the store again: its scheduler should not notice."""


class Promoted(set[OffloadKey]):
    """Keys that a request has had brought into host rows."""


class _Either:
    """Membership in one of two sets, without making their union."""

    def __init__(self, one: Container[OffloadKey], other: Container[OffloadKey]) -> None:
        self._one, self._other = one, other

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._one or key in self._other


class StoreOffloadingManager(TieringOffloadingManager):
    """All methods run on the scheduler's thread."""

    def __init__(self, primary_tier: Any, secondary_tiers: list[StoreTier]) -> None:
        super().__init__(primary_tier, secondary_tiers)
        self.stores = True
        """Whether what this engine computes is kept."""
        self._failed_stores: set[OffloadKey] = set()
        self._hits: set[OffloadKey] = set()
        """Keys that a lookup of this step has answered HIT for: vLLM loads them without looking again."""
        self._old_hits: list[OffloadKey] = []
        """Those of them that may be among the first to be evicted."""
        self._evict = primary_tier._policy.evict
        primary_tier._policy.evict = self._give_away
        # More, and the first rows of a long prompt would make room for its last ones before they are used.
        self._most_promoted = max(1, primary_tier._num_chunks // 2)

    def fail_store(self, keys: Iterable[OffloadKey]) -> None:
        """Let the coming `complete_store` of these keys, whose rows were not written whole, drop them."""
        self._failed_stores.update(keys)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """vLLM's, which takes every copy for a good one."""
        failed = not self._failed_stores.isdisjoint(keys)
        self._failed_stores.difference_update(keys)
        super().complete_store(keys, req_context, success and not failed)

    def lookup(self, key: OffloadKey, req_context: ReqContext, **kwargs: Any) -> LookupResult:
        """vLLM's, but for what the request has failed to load, and for rows that a disk has not given back."""
        self._maybe_process_finished_jobs()  # vLLM's first step, which may refuse keys
        refused: Refused | None = req_context.get_state(Refused)
        if refused is not None and key in refused:
            return LookupResult.MISS
        if any(key in tier.captive for tier in self.secondary_tiers):
            return LookupResult.MISS
        result: LookupResult = super().lookup(key, req_context, **kwargs)
        if result is LookupResult.HIT and key not in self._hits:
            self._hits.add(key)
            self._old_hits.append(key)
        return result

    def _initiate_promotion(self, tier_idx: int, key: OffloadKey, req_context: ReqContext) -> bool:
        """vLLM's, once for a key and a request: rows that went again before they were used would go on going."""
        promoted: Promoted | None = req_context.get_state(Promoted)
        if promoted is None:
            req_context.set_state(promoted := Promoted())
        if key in promoted or len(promoted) >= self._most_promoted:
            return False
        if self._old_hits:  # else each promotion would pass over all of them to find a row to give away
            self.primary_tier.touch(self._old_hits, req_context)
            self._old_hits = []
        started: bool = super()._initiate_promotion(tier_idx, key, req_context)
        if started:
            promoted.add(key)
        return started

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """vLLM's; nothing of an engine that only loads, and again what is in a host row and the store had to drop."""
        if not self.stores:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        prepared: PrepareStoreOutput | None = super().prepare_store(keys, req_context)
        if prepared is None and len(keys) > (rows := self.primary_tier._num_chunks):
            # vLLM would offer them again, and warn, in every step.
            logger.warning_once("cpu_bytes_to_use holds %d blocks: of more new ones only the first are stored", rows)
            prepared = super().prepare_store(list(keys)[: self._most_promoted], req_context)
        for tier in self.secondary_tiers:
            if again := [key for key in keys if key in tier.unstored][:MOST_AGAIN]:
                tier.unstored.difference_update(again)
                tier.submit_store(self.create_store_job(again, req_context))
        return prepared

    def _give_away(self, count: int, protected: Container[OffloadKey]) -> list[tuple[OffloadKey, Any]] | None:
        """The policy's `evict`, which spares hits of this step."""
        evicted: list[tuple[OffloadKey, Any]] | None = self._evict(count, _Either(protected, self._hits))
        for tier in self.secondary_tiers:
            tier.unstored.difference_update(key for key, _ in evicted or ())
        return evicted

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Any:
        """vLLM's; what is used now may be brought again, should the request be preempted."""
        promoted: Promoted | None = req_context.get_state(Promoted)
        if promoted is not None:
            promoted.difference_update(keys)
        return super().prepare_load(keys, req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """vLLM's."""
        super().on_schedule_end(context)
        self._hits.clear()
        self._old_hits.clear()

    def reset_cache(self) -> None:
        """vLLM's."""
        super().reset_cache()
        for tier in self.secondary_tiers:
            tier.unstored.clear()
        self._failed_stores.clear()
        self._hits.clear()
        self._old_hits.clear()

    def shutdown(self) -> None:
        """vLLM's; memory that a disk may still write into stays mapped."""
        try:
            super().shutdown()
        except TimeoutError as error:
            logger.error("%s", error)
