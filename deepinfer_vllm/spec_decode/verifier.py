"""Which drafts a step verifies, where the device is the host: exact on both sides, without graphs, streams and events.

vLLM's runner has a seam for it, "adaptive verification": the scheduler schedules every draft, the runner takes out
those that are not to be verified, and to the scheduler these look rejected. `HostVerifier` has the interface of vLLM's
own manager, which decides on the device and leaves the host with bounds; here the counts that the runner gets are the
true ones, so nothing of it needs to know that drafts were left out.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.budget import allot, survival
from deepinfer_vllm.spec_decode.controller import Controller, Plan
from deepinfer_vllm.spec_decode.listeners import Listens
from deepinfer_vllm.spec_decode.scheduled import Scheduled
from deepinfer_vllm.spec_decode.speculator import HostSpeculator
from deepinfer_vllm.spec_decode.stats import DraftStats
from deepinfer_vllm.spec_decode.step_times import StepTimes

UNKNOWN = 0.8
"""The confidence of every draft where there is no confidence head; the controller corrects it by what is accepted."""
Order = Callable[[dict[str, int], dict[str, list[int]], int], list[str]]


class HostVerifier:
    """Decides about drafts, and learns from what becomes of them. One thread, the runner's.

    A step of the runner calls, in this order: `began`, `get_num_tokens`, `compact_batch` and `reallocate_drafts` (these
    three only if drafts are scheduled), then of the speculator's `Decider` `verified`, `wants_drafts`, `drafted`, and
    at last `record_confidences`. R: requests of the batch, in its order; S: draft positions.
    """

    def __init__(
        self,
        controller: Controller,
        times: StepTimes,
        speculator: HostSpeculator,
        req_states: Any,
        query_start_loc: torch.Tensor,
        bonus_tokens: int,
        order: Order,
        extra: tuple[None, ...] = (),
    ) -> None:
        """`order` is the runner's order of a batch; `extra` ends what `reallocate_drafts` returns in newer vLLM."""
        self.controller, self.times = controller, times
        self.listeners: list[Listens] = []
        self.stats: DraftStats | None = None
        self._speculator, self._states = speculator, req_states
        self._query_start_loc, self._bonus, self._order, self._extra = query_start_loc, bonus_tokens, order, extra
        shape = req_states.max_num_reqs, req_states.num_speculative_steps
        self._confidences = np.full(shape, UNKNOWN, np.float32)
        """Of the drafts at hand, by the request's slot."""
        self._older = np.ones(shape, np.float32)
        """Of those before."""
        self._ready = np.zeros(shape[0], bool)
        """Whether a slot has drafts at hand."""
        self._plan: Plan | None = None
        self._ids: list[str] = []
        self._slots: NDArray[np.int64] = np.zeros(0, np.int64)
        self._drafts = self._slots
        self._sampled: NDArray[np.int64] = np.zeros(0, np.int64)
        self._idle = False

    def add_request(self, req_idx: int) -> None:
        """A request comes to a slot, or comes back to one after a preemption."""
        self._ready[req_idx] = False
        self._confidences[req_idx] = UNKNOWN
        self._older[req_idx] = 1.0

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
        delayed = self.controller.settings.form == "delayed"
        known = (self._older if delayed else self._confidences)[slots]
        plan = self.controller.plan(known, at_hand, base_tokens, step.context_tokens, step.sampling)
        self._plan, self._slots, self._ids = plan, slots, ids
        self._drafts = allot(survival(self._confidences[slots], at_hand), plan.budget) if delayed else plan.drafts
        return base_tokens + int(self._drafts.sum())

    def compact_batch(
        self,
        num_draft_tokens_per_req: NDArray[np.int32],
        num_scheduled_tokens: NDArray[np.int32],
        cu_num_logits_np: NDArray[np.int32],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """[R] tokens of each request without the drafts that are left out, and where its logits begin [R + 1]."""
        tokens = num_scheduled_tokens - num_draft_tokens_per_req + self._drafts.astype(np.int32)
        self._first_logits = np.concatenate(([0], np.cumsum(self._drafts + self._bonus))).astype(np.int32)
        return tokens, self._first_logits

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """What the device is told, which the host knew: where logits begin, where tokens begin, and drafts in all."""
        return torch.from_numpy(self._first_logits), self._query_start_loc, int(self._drafts.sum()), *self._extra

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
        self.times.ended(batch.req_ids, batch.num_tokens, context_tokens, batch.num_reqs if drafting else 0)
        if self.stats is not None:
            self._count(self.stats, batch.num_reqs)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Keep the confidences of the drafts that were just made; there are none for a prompt that is not complete."""
        slots = input_batch.idx_mapping_np
        self._ready[slots] = (self._sampled > 0) if self._speculator.drafting else False
        if self._speculator.drafting and self._speculator.use_confidence_head:
            self._older[slots] = self._confidences[slots]
            self._confidences[slots] = confidence_probs[: len(slots)].numpy()

    def _count(self, stats: DraftStats, requests: int) -> None:
        sampled = self._sampled > 0
        drafts = np.zeros(requests, np.int64) if self._plan is None else self._drafts
        stats.verified(drafts[sampled], np.clip(self._sampled - self._bonus, 0, drafts)[sampled])
        if self._speculator.drafting:
            stats.drafted(requests)
        elif sampled.any():
            stats.withheld()
        if self._plan is not None and self.times.measured_s:
            stats.timed(self._plan.seconds, self.times.measured_s)
        if (error := self.controller.costs.error) is not None:
            stats.gauges["cost_error"] = error
