"""Which drafts a step verifies, where the device is the host and has their confidences at hand."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.controller import Controller, Plan
from deepinfer_vllm.spec_decode.listeners import Listens
from deepinfer_vllm.spec_decode.scheduled import Scheduled
from deepinfer_vllm.spec_decode.speculator import UNKNOWN, ControlledSpeculator
from deepinfer_vllm.spec_decode.stats import DraftStats
from deepinfer_vllm.spec_decode.step_times import StepTimes
from deepinfer_vllm.spec_decode.trimming import Order, Trimming


class HostVerifier(Trimming):
    """Decides about drafts, and learns from what becomes of them. One thread, the runner's.

    A step of the runner calls, in this order: `began`, `get_num_tokens`, `compact_batch` and `reallocate_drafts` (these
    three only if drafts are scheduled), then of the speculator's `Decider` `verified`, `wants_drafts`, `drafted`, and
    at last `record_confidences`. R: requests of the batch, in its order; S: draft positions.
    """

    def __init__(
        self,
        controller: Controller,
        times: StepTimes,
        speculator: ControlledSpeculator,
        req_states: Any,
        query_start_loc: torch.Tensor,
        bonus_tokens: int,
        order: Order,
        extra: tuple[None, ...] = (),
    ) -> None:
        """See `Trimming`."""
        super().__init__(query_start_loc, bonus_tokens, order, extra)
        self.controller, self.times = controller, times
        self.listeners: list[Listens] = []
        self.stats: DraftStats | None = None
        self._speculator, self._states = speculator, req_states
        shape = req_states.max_num_reqs, req_states.num_speculative_steps
        self._confidences = np.full(shape, UNKNOWN, np.float32)
        """Of the drafts at hand, by the request's slot."""
        self._ready = np.zeros(shape[0], bool)
        """Whether a slot has drafts at hand."""
        self._plan: Plan | None = None
        self._ids: list[str] = []
        self._slots: NDArray[np.int64] = np.zeros(0, np.int64)
        self._sampled: NDArray[np.int64] = np.zeros(0, np.int64)
        self._idle = False

    def add_request(self, req_idx: int) -> None:
        """A request comes to a slot, or comes back to one after a preemption."""
        self._ready[req_idx] = False
        self.controller.came()
        self._confidences[req_idx] = UNKNOWN

    def began(self, *, usual: bool, idle: bool) -> None:
        """A step begins. `idle`: the runner does it without asking what to verify, as when it warms up."""
        self._plan, self._idle = None, idle
        self.times.began(usual=usual and not idle)

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Tokens of the step, once it is decided how many of the drafts that are scheduled it verifies."""
        ids = self._order(num_tokens_per_req, draft_tokens, self._confidences.shape[1] + self._bonus)
        step = Scheduled.of(ids, num_tokens_per_req, draft_tokens, self._states)
        slots, base_tokens = step.slots, int(step.rest.sum())
        at_hand = np.where(self._ready[slots], step.drafts, 0)
        plan = self.controller.plan(self._confidences[slots], at_hand, base_tokens, step.context_tokens, step.sampling)
        self._plan, self._slots, self._ids, self._drafts = plan, slots, ids, plan.drafts
        return base_tokens + int(self._drafts.sum())

    def verified(self, num_sampled: torch.Tensor) -> None:
        """See `Decider`."""
        self.times.sampled()
        self._sampled = num_sampled.numpy().astype(np.int64)
        if self._plan is None:
            return
        confidences, drafts = self._confidences[self._slots], self._drafts
        accepted = np.clip(self._sampled - self._bonus, 0, drafts)
        if drafts.any():
            self.controller.verified(confidences, drafts, accepted)
            for listener in self.listeners:
                listener.record(confidences, drafts, accepted, self._ids)

    def wants_drafts(self, batch: Any) -> bool:
        """See `Decider`. No block for a batch of incomplete prompts, whose drafts nobody would verify."""
        requests = np.count_nonzero(self._sampled)
        if self._idle or not requests:
            return self._idle
        if self._plan is not None:
            return self._plan.drafting
        return self.controller.wants_drafts(int(requests), int(batch.num_computed_tokens_np.sum()))

    def drafted(self, batch: Any) -> None:
        """See `Decider`."""
        if self._idle:
            return
        drafting, context_tokens = self._speculator.drafting, int(batch.num_computed_tokens_np.sum())
        drafted_for = batch.num_reqs if drafting else 0
        at_hand = self._plan is not None
        self.times.ended(batch.req_ids, batch.num_tokens, context_tokens, drafted_for, drafts=at_hand)
        if self.stats is not None:
            self._count(self.stats, batch.num_reqs)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Keep the confidences of the drafts that were just made; there are none for a prompt that is not complete."""
        slots = input_batch.idx_mapping_np
        self._ready[slots] = (self._sampled > 0) if self._speculator.drafting else False
        if self._speculator.drafting and self._speculator.use_confidence_head:
            self._confidences[slots] = confidence_probs[: len(slots)].numpy()

    def _count(self, stats: DraftStats, requests: int) -> None:
        drafts = np.zeros(requests, np.int64) if self._plan is None else self._drafts
        accepted = np.clip(self._sampled - self._bonus, 0, drafts)
        stats.stepped(self._sampled > 0, drafts, accepted, drafted=self._speculator.drafting)
        if self._plan is not None and self.times.measured_s:
            stats.timed(self._plan.seconds, self.times.measured_s)
        if (error := self.controller.costs.error) is not None:
            stats.gauges["cost_error"] = error
