"""Which drafts a step verifies, where the device decides: vLLM's manager with our calibration, costs and rule.

Its device side stays: drafts are ranked there by the confidences of these very drafts. The host chooses how many, a
step late, as it must on a device that it does not wait for. Whether a block is drafted at all stays vLLM's, too.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.controller import Controller
from deepinfer_vllm.spec_decode.cost_table import CostTable
from deepinfer_vllm.spec_decode.scheduled import Scheduled
from deepinfer_vllm.spec_decode.settings import Settings
from deepinfer_vllm.spec_decode.shared_times import SharedTimes, Time

UNDER_WAY = 8
"""Steps whose end is waited for at most; times of further ones are not taken."""


class _Step(NamedTuple):
    began: Any
    ended: Any
    tokens: int
    requests: int
    context_tokens: int


class DeviceVerifier(AdaptiveVerificationManager):
    """One thread, the runner's; nothing here waits for the device. `configure` comes before everything else."""

    def configure(
        self,
        settings: Settings,
        calibration: Calibration | None,
        event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True),
    ) -> None:
        """Of the form "delayed". `event` makes what tells the device's time."""
        if settings.form != "delayed":
            raise ValueError(f"form={settings.form}: where the device decides, it must be delayed")
        self.settings, self._event = settings, event
        self._temperatures = None
        if calibration is not None and not calibration.is_identity:
            self._temperatures = torch.tensor(calibration.temperatures, device=self.req_states.device)
        self._contexts: list[int] = []
        """Context tokens of each request in each batch that is profiled."""
        self._began: Any = None
        self._sizes = (0, 0, 0)
        self._under_way: deque[_Step] = deque(maxlen=UNDER_WAY)

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """vLLM's batches, and the middle size at four times their context: for what a token of context costs."""
        self._contexts = []
        batches = list(super().batches_to_profile(capture_sizes))
        middle = capture_sizes[len(capture_sizes) // 2] if capture_sizes else 0
        batches += [{**b, "context_len": 4 * b["context_len"]} for b in batches if b["num_tokens"] == middle]
        for batch in batches:
            self._contexts.append(batch["context_len"])
            yield batch

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """vLLM's hook: times of the batches above, in their order. A collective call."""
        samples, contexts = get_tp_group().broadcast_object((samples, self._contexts), src=0)
        super().set_initial_cost_curves(samples)
        steps = list(zip(samples, contexts, strict=True))
        verify = [(s.num_target_tokens, s.num_reqs * context, s.forward_ms / 1000) for s, context in steps]
        draft = [(s.num_reqs, s.num_reqs * context, s.drafter_ms / 1000) for s, context in steps if s.full_cudagraph]
        costs = CostTable.measured(verify, draft, padded_to=self._cudagraph_limit)
        self.controller = Controller(None, costs, self.settings)
        self._times = SharedTimes(self.controller, get_tp_group())

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """vLLM's hook: tokens of the step with as many drafts as the controller finds worth their time."""
        self._take_times()
        ids = list(num_tokens_per_req)
        step = Scheduled.of(ids, num_tokens_per_req, draft_tokens, self.req_states)
        base_tokens = int(step.rest.sum())
        plan = self.controller.plan(
            self._stale_confidences[self._stale_idx].np[step.slots],
            step.drafts,
            base_tokens,
            step.context_tokens,
            step.sampling,
            most=max(0, self._max_total_logits - len(ids) * self.num_bonus_tokens),
        )
        counts = (dict(zip(ids, numbers.tolist(), strict=True)) for numbers in (step.drafts, step.rest))
        self._batch_budget = (*counts, plan.budget)
        self._sizes = base_tokens + plan.budget, len(ids), step.context_tokens
        self._began = self._event()
        self._began.record()
        return self._sizes[0]

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """vLLM's hook as a step ends: confidences go to the ranking and to the host as the calibration has them."""
        if self._temperatures is not None:
            confidence_probs = torch.sigmoid(torch.logit(confidence_probs, eps=1e-6) / self._temperatures)
        super().record_confidences(confidence_probs, input_batch)
        if self._began is not None:
            ended = self._event()
            ended.record()
            self._under_way.append(_Step(self._began, ended, *self._sizes))
            self._began = None

    def _take_times(self) -> None:
        """Of steps that have ended. The draft block's part, which is not told apart, is as the table has it."""
        self._times.begin_step()
        while self._under_way and self._under_way[0].ended.query():
            step = self._under_way.popleft()
            seconds = step.began.elapsed_time(step.ended) / 1000
            seconds -= self.controller.costs.draft_s(step.requests, step.context_tokens)
            self._times.tell(Time("verify", step.tokens, step.context_tokens, seconds))
