"""The connector as one side of a hand-over: what kv_role lets it store and load, and when requests end or begin."""

from math import lcm
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.request import RequestStatus

from deepinfer_vllm import compat
from deepinfer_vllm.kv_connector.config import ConnectorConfig
from deepinfer_vllm.kv_connector.handover import REMOTE_DECODE, STORED_TOKENS, AnswerGate, ArrivalWait, stored_tokens
from deepinfer_vllm.kv_connector.metrics import Sums
from deepinfer_vllm.kv_connector.request import PARAMS, Prefix
from deepinfer_vllm.kv_connector.snapshot_connector import SnapshotConnector


class HandoverConnector(SnapshotConnector):
    """kv_producer stores and does not load, kv_consumer loads and does not store, kv_both does both.

    vLLM's offloading does both whatever its role.
    """

    answer_gate: AnswerGate | None = None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._produces, self._consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        patience = ConnectorConfig.parse(transfer.kv_connector_extra_config).pd_wait_s
        self._arrivals = ArrivalWait(patience)
        if role != KVConnectorRole.SCHEDULER:
            return
        self.scheduler.manager.stores = self._produces
        if self._produces:
            self.answer_gate = AnswerGate(self._is_stored, self._give_up, patience)
            compat.hold_answers()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's answer, or "ask again" while blocks that another engine says it has stored have not arrived."""
        expected = self._expected(request) if self._consumes else 0
        if expected and self._arrivals.too_early(request.request_id):
            return None, False
        found, loads = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found is None or not self._arrivals.waits(request.request_id, num_computed_tokens + found, expected):
            return found, loads
        Prefix.of(self.scheduler._req_status[request.request_id].req_context).forget()
        return None, False

    def _max_loadable_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        return super()._max_loadable_tokens(request, num_computed_tokens) if self._consumes else 0

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's hook: a request ends. One that another engine continues is answered when its blocks can be read."""
        keep, answer = super().request_finished_all_groups(request, block_ids)
        self._arrivals.forget(request.request_id)
        asked = request.kv_transfer_params
        continued = isinstance(asked, dict) and bool(asked.get(REMOTE_DECODE))
        if self.answer_gate is None or not (continued or not self._consumes):
            return keep, answer
        if request.status is RequestStatus.FINISHED_ABORTED or (tokens := self._storable(request)) == 0:
            return keep, answer
        for tier in self.scheduler.manager.secondary_tiers:
            tier.await_stores(request.request_id)
        self.answer_gate.hold(request.request_id)
        return keep, {**(answer or {}), PARAMS: {STORED_TOKENS: tokens}}

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step on though no request runs."""
        return super().has_pending_push_work() or (self.answer_gate is not None and self.answer_gate.pending())

    def _sums(self) -> Sums:
        sums = super()._sums()
        sums["handovers", ("blocks_missed",)] = self._arrivals.missed
        if self.answer_gate is not None:
            sums["handovers", ("answer_late",)] = self.answer_gate.late
        return sums

    def _is_stored(self, request_id: str) -> bool:
        return all(tier.stores_ended(request_id) for tier in self.scheduler.manager.secondary_tiers)

    def _give_up(self, request_id: str) -> None:
        for tier in self.scheduler.manager.secondary_tiers:
            tier.forget_stores(request_id)

    @property
    def _unit(self) -> int:
        """Tokens of the smallest hit."""
        return lcm(*(group.tokens_per_chunk for group in self.scheduler.config.kv_group_configs))

    def _storable(self, request: Any) -> int:
        if (status := self.scheduler._req_status.get(request.request_id)) is None:
            return 0
        prompt: int = self.scheduler._calc_num_offloadable_tokens(status, request.num_prompt_tokens)
        return prompt // self._unit * self._unit

    def _expected(self, request: Any) -> int:
        """What a request must find of what another engine stored. vLLM drops the last block of a draft's own layers."""
        drops = any(group.is_eagle_group for group in self.scheduler.config.kv_group_configs)
        most: int = (request.num_prompt_tokens - 1) // self._unit * self._unit
        return max(0, min(stored_tokens(request.kv_transfer_params), most) - drops * self._unit)
