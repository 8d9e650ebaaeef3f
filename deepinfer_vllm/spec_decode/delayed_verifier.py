"""Which drafts a step verifies, decided before they are drawn: on any device, without graphs, and without waiting.

The host launches a step while the device still works on the one before, whose drafts it will verify. What is known is
what the steps before those have brought: their confidences and outcomes arrive by themselves, and a forecast from them
says what the drafts to come are worth. The newest step is never looked at, also where it is already done: a decision
about drafts must not follow from these drafts (see `budget`).
"""

from typing import Any

import numpy as np
import torch

from deepinfer_vllm.spec_decode.arrivals import Queue
from deepinfer_vllm.spec_decode.controller import Controller, Plan
from deepinfer_vllm.spec_decode.device_times import DeviceTimes
from deepinfer_vllm.spec_decode.forecast import Forecast
from deepinfer_vllm.spec_decode.ledger import Ledger, Outcome, Step
from deepinfer_vllm.spec_decode.listeners import Listens
from deepinfer_vllm.spec_decode.scheduled import Scheduled, samples
from deepinfer_vllm.spec_decode.speculator import ControlledSpeculator
from deepinfer_vllm.spec_decode.stats import DraftStats
from deepinfer_vllm.spec_decode.trimming import Order, Trimming

UNSEEN = 1
"""Newest steps that decisions do not look at."""


class DelayedVerifier(Trimming):
    """Decides about drafts, and learns from what becomes of them. One thread, the runner's.

    A step calls what it calls of a `HostVerifier`. R: requests of the batch, in its order; S: draft positions.
    """

    def __init__(
        self,
        controller: Controller,
        times: DeviceTimes,
        queue: Queue,
        speculator: ControlledSpeculator,
        req_states: Any,
        query_start_loc: torch.Tensor,
        bonus_tokens: int,
        order: Order,
        extra: tuple[None, ...] = (),
        *,
        wait: bool,
    ) -> None:
        """wait: until all but the newest step have arrived, so that ranks which must decide alike know the same."""
        super().__init__(query_start_loc, bonus_tokens, order, extra)
        self.controller, self.times, self.queue = controller, times, queue
        self.listeners: list[Listens] = []
        self.stats: DraftStats | None = None
        self._speculator, self._states, self._wait = speculator, req_states, wait
        slots, positions = req_states.max_num_reqs, req_states.num_speculative_steps
        self._ledger = Ledger(slots, positions, bonus_tokens)
        self._forecast = Forecast(slots, positions)
        self._ready = np.zeros(slots, bool)
        """Whether a slot has drafts at hand."""
        self._plan: Plan | None = None
        self._idle, self._usual = False, True
        self._before: Step | None = None

    def add_request(self, req_idx: int) -> None:
        """A request comes to a slot, or comes back to one after a preemption."""
        self._ready[req_idx] = False
        self.controller.came()
        self._ledger.add_request(req_idx)
        self._forecast.forget(req_idx)

    def began(self, *, usual: bool, idle: bool) -> None:
        """A step begins. `idle`: the runner does it without asking what to verify, as when it warms up."""
        self._plan, self._idle, self._usual = None, idle, usual
        self.times.begin_step()
        self._began = self.queue.moment()

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Tokens of the step, once it is decided how many of the drafts that are scheduled it verifies."""
        ids = self._order(num_tokens_per_req, draft_tokens, self._states.num_speculative_steps + self._bonus)
        step = Scheduled.of(ids, num_tokens_per_req, draft_tokens, self._states)
        at_hand, base_tokens = np.where(self._ready[step.slots], step.drafts, 0), int(step.rest.sum())
        survivals = self._forecast.of(step.slots) if self._forecast.known else None
        self._plan = self.controller.plan_ahead(survivals, at_hand, base_tokens, step.context_tokens, step.sampling)
        self._drafts = self._plan.drafts
        return base_tokens + int(self._drafts.sum())

    def verified(self, num_sampled: torch.Tensor) -> None:
        """See `Decider`."""
        self._num_sampled, self._sampled = num_sampled, self.queue.moment()

    def wants_drafts(self, batch: Any) -> bool:
        """See `Decider`. No block for a batch of incomplete prompts, whose drafts nobody would verify."""
        self._samples = samples(batch)
        requests = int(np.count_nonzero(self._samples))
        if self._idle or not requests:
            return self._idle
        if self._plan is not None:
            return self._plan.drafting
        return self.controller.wants_drafts(requests, int(batch.num_computed_tokens_np.sum()))

    def drafted(self, batch: Any) -> None:
        """See `Decider`."""
        if self._idle:
            return
        drafting, plan = self._speculator.drafting, self._plan
        self._ready[batch.idx_mapping_np] = self._samples if drafting else False
        drafts = self._drafts if plan is not None else np.zeros(batch.num_reqs, np.int64)
        confidences = self._speculator.draft_token_confidence_probs[: batch.num_reqs]
        self._ledger.launched(
            Step(
                batch.req_ids,
                batch.idx_mapping_np.astype(np.int64),
                drafts,
                self._samples,
                drafting,
                batch.num_tokens,
                int(batch.num_computed_tokens_np.sum()),
                0.0 if plan is None else plan.seconds,
                self._usual,
                self._began,
                self._sampled,
                self.queue.fetch(self._num_sampled, confidences),
            )
        )
        for outcome in self._ledger.arrived(keep=UNSEEN, wait=self._wait):  # while the device is at work
            self._learn(outcome)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """vLLM's hook as a step ends; `drafted` has kept them."""

    def _learn(self, outcome: Outcome) -> None:
        step = outcome.step
        if outcome.drafts.any():
            self.controller.verified(outcome.confidences, outcome.drafts, outcome.accepted)
            for listener in self.listeners:
                listener.record(outcome.confidences, outcome.drafts, outcome.accepted, step.ids)
        whole = step.samples & outcome.still
        if step.drafted and whole.any():
            self._forecast.saw(step.slots[whole], self.controller.survivals(outcome.drawn[whole]))
            self.controller.drawn(self._forecast.of(step.slots[whole]))
        elif not step.drafted:
            self._forecast.aged()
        self.times.arrived(step)
        if self._before is not None:  # until now its end was the beginning of this one
            self.queue.read(self._before.arrival)
        self._before = step
        if self.stats is not None:
            self.stats.stepped(step.samples, outcome.drafts, outcome.accepted, drafted=step.drafted)
            if step.predicted_s and self.times.measured_s:
                self.stats.timed(step.predicted_s, self.times.measured_s)
            if (error := self.controller.costs.error) is not None:
                self.stats.gauges["cost_error"] = error
