"""vLLM's schedulers with chunks of prompts cut by predicted time; everything else is theirs."""

from operator import attrgetter
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.multimodal.utils import get_mm_features_in_window
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from deepinfer_costmodel.step import Load
from deepinfer_vllm.compat.engine_reports import STEPS, attach
from deepinfer_vllm.scheduling.costs import Costs
from deepinfer_vllm.scheduling.cuts import PLAIN, Cuts, requested_checkpoints
from deepinfer_vllm.scheduling.plan import StepPlan
from deepinfer_vllm.scheduling.settings import Settings
from deepinfer_vllm.scheduling.start import check_config, index_selects
from deepinfer_vllm.scheduling.stats import SchedulerStats
from deepinfer_vllm.scheduling.step_times import Step, StepTimes

logger = init_logger("vllm." + __name__)

TOLD_AFTER = 64
"""Steps that could not keep to the target."""

_drafts = attrgetter("spec_token_ids")


class CostModelScheduler(Scheduler):
    """Of a step's decodes the time is predicted, and the rest of the target goes to prompts, oldest first.

    One name for both modes: with async scheduling it makes an `AsyncCostModelScheduler`.
    """

    max_num_active_reqs: int

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> "CostModelScheduler":
        if cls is CostModelScheduler and vllm_config.scheduler_config.async_scheduling:
            cls = AsyncCostModelScheduler
        made: CostModelScheduler = super().__new__(cls)
        return made

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM's. Raises ValueError for a setting that is not allowed, or a model whose chunks vLLM cuts itself."""
        super().__init__(vllm_config, *args, **kwargs)
        self._settings = settings = Settings.read()
        self._cuts_chunks = check_config(self, settings, logger.warning)
        self._costs = Costs(
            mode="replay" if self.prefix_replay_tokens else "full",
            cap_tokens=index_selects(vllm_config.model_config),
            file=settings.file,
            source=f"{vllm_config.model_config.model}",
            warn=logger.warning,
        )
        self._times, self._stats = StepTimes(), SchedulerStats(self._costs, settings.target_s)
        self._decode_tokens = 1 + self.num_spec_tokens
        self._admits = self.max_num_active_reqs
        self._cuts: WeakKeyDictionary[Request, tuple[int, Cuts]] = WeakKeyDictionary()
        self._context = 0
        """Cached tokens of the requests that decode."""
        self._plan = self._plan_step()
        self._steps_beyond_target = 0
        self._embeds = 0
        """Of images that the request at hand has encoded in this step."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """See Scheduler."""
        began_s = perf_counter()
        self._plan = self._plan_step()
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = self._admits
        load = self._load_of(output)
        self._context = self._context_after(load)
        predicted_s = self._costs.now.seconds(load)
        self._times.scheduled(Step(output, load, predicted_s, began_s))
        if load.chunks:
            cut = sum(self._ends_at_checkpoint(output, *chunk) for chunk in self._plan.chunks.items())
            self._stats.scheduled(load, predicted_s, cut, self._plan.beyond_target)
            self._tell_if_beyond_target()
        return output

    def _tell_if_beyond_target(self) -> None:
        """Once, and not of the first steps, whose costs are guesses."""
        self._steps_beyond_target += self._plan.beyond_target
        if not self._plan.beyond_target or self._steps_beyond_target != TOLD_AFTER:
            return
        tail, decodes_s = self._costs.tail, self._costs.now.seconds(self._plan.decodes)
        logger.warning(
            "DEEPINFER_VLLM_SCHED_TARGET_MS=%.4g cannot be kept: decodes alone take %.4g ms, slow steps %.2f of what "
            "they should, and prompts get DEEPINFER_VLLM_SCHED_PREFILL_SHARE=%g of their throughput at least. Set the "
            "first to %.4g or more, or lower the second.",
            1000 * self._settings.target_s,
            1000 * decodes_s,
            tail,
            self._settings.least_share,
            1000 * tail * (decodes_s + self._plan.least_s),
        )

    def _plan_step(self) -> StepPlan:
        decodes = Load()
        prefills = sum(request.status is RequestStatus.RUNNING for request in self._inflight_prefills)
        if (count := len(self.running) - prefills) > 0:
            tokens = count
            if self.num_spec_tokens:
                tokens += sum(map(len, map(_drafts, self.running)))
            decodes = Load(decodes=tokens, context=self._context)
        costs = self._costs
        known = max(2 * costs.most_tokens, self._settings.grid)  # so that a bad start costs a step or two
        return StepPlan(self._settings, costs.now, decodes, tail=costs.tail, tokens=known)

    def _chunk(self, request: Request, start: int, tokens: int) -> int:
        """As many of the `tokens` from `start` as the step has room for."""
        if tokens <= self._decode_tokens or not self._cuts_chunks:
            return tokens
        cuts = self._cuts_of(request)
        encoded = self._to_encode(request, start, start + tokens) if request.mm_features else ()
        final = start + tokens >= request.num_tokens
        found = self._plan.tokens(start, tokens, cuts, final=final, encoded=encoded)
        if cuts.outside(start + found) != start + found:
            logger.warning_once(
                "An image is larger than what decodes leave of --max-num-batched-tokens=%s and is cut; raise that.",
                self.max_num_scheduled_tokens,
            )
        return found

    def _to_encode(self, request: Request, start: int, end: int) -> list[tuple[int, int]]:
        """First position and embeddings of the images between these positions that are not in the encoder's cache."""
        first, last = get_mm_features_in_window(request.mm_features, start=start, end=end)
        cached = self.encoder_cache_manager.get_cached_num_encoder_embeds
        return [
            (at.offset, at.get_num_embeds())
            for number in range(first, last)
            if cached(request, number) is None
            for at in (request.mm_features[number].mm_position,)
        ]

    def _cuts_of(self, request: Request) -> Cuts:
        if not request.mm_features and not request.kv_transfer_params:
            return PLAIN
        count, cuts = self._cuts.get(request, (-1, PLAIN))
        if count != len(request.mm_features):  # a session gets more of them
            images = ((f.mm_position.offset, f.mm_position.length) for f in request.mm_features)
            cuts = Cuts.of(requested_checkpoints(request.kv_transfer_params), images)
            self._cuts[request] = len(request.mm_features), cuts
        return cuts

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """See Scheduler. Cut before, so that images behind the cut are not encoded yet."""
        tokens = self._chunk(request, num_computed_tokens, num_new_tokens)
        found = super()._try_schedule_encoder_inputs(request, num_computed_tokens, tokens, *args, **kwargs)
        self._embeds = self._embeds_of(request, found[0])
        return found

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """See Scheduler: its last word on every request's tokens, and so ours on those without images."""
        if num_new_tokens <= self._decode_tokens:
            if self.num_prefill_lookahead > 1:
                return int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))
            return max(num_new_tokens, 0)  # what it comes to, and 512 of these calls are made in a step
        tokens = num_new_tokens
        if not request.mm_features:
            tokens = self._chunk(request, num_computed_tokens, tokens)
        tokens = int(super()._reserve_prefill_lookahead(request, num_computed_tokens, tokens))
        if tokens:
            self._plan.add(request.request_id, num_computed_tokens, tokens, self._embeds if request.mm_features else 0)
        if not tokens or self._plan.full:
            self.max_num_active_reqs = 0  # no lookups of prefixes for requests that this step has no room for
        return tokens

    def _load_of(self, output: Any) -> Load:
        """What there is to compute in a scheduled step."""
        scheduled, cap = output.num_scheduled_tokens, self._costs.now.prefill.cap_tokens
        load = Load()
        for request, (start, tokens) in self._plan.chunks.items():
            if scheduled.get(request) == tokens:
                load = load.chunk(tokens, start, cap)
        fresh = {new.req_id for new in output.scheduled_new_reqs}
        continued = (start for name, (start, _) in self._plan.chunks.items() if name in scheduled and name not in fresh)
        return load._replace(
            decodes=output.total_num_scheduled_tokens - load.tokens,
            context=max(0, sum(output.scheduled_cached_reqs.num_computed_tokens) - sum(continued)),
            embeds=sum(
                self._embeds_of(self.requests[request], inputs)
                for request, inputs in output.scheduled_encoder_inputs.items()
            ),
        )

    def _context_after(self, load: Load) -> int:
        """Cached tokens of the requests that decode in the next step, but for those that end until then. Asking 512
        requests would take longer than all else here."""
        ended = (
            start + tokens
            for name, (start, tokens) in self._plan.chunks.items()
            if (request := self.requests.get(name)) is not None and not request.is_prefill_chunk
        )
        return load.context + load.decodes + sum(ended)

    @staticmethod
    def _embeds_of(request: Request, inputs: list[int]) -> int:
        return sum(request.mm_features[at].mm_position.get_num_embeds() for at in inputs)

    def _ends_at_checkpoint(self, output: Any, request: str, chunk: tuple[int, int]) -> bool:
        cuts = self._cuts.get(self.requests[request]) if request in output.num_scheduled_tokens else None
        return cuts is not None and sum(chunk) in cuts[1].checkpoints

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """See Scheduler. The engine asks while the step runs: nobody waits for what is learnt then."""
        if self._costs.due:
            self._costs.refit()
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """See Scheduler."""
        ended = self._times.ended(scheduler_output, perf_counter())
        if ended is not None and scheduler_output.total_num_scheduled_tokens:
            step, seconds = ended
            self._costs.observe(step.load, step.predicted_s, seconds)
            self._stats.measured(step.predicted_s, seconds)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._times.goes_on(bool(self.running))
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """See Scheduler."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and (report := self._stats.take()):
            attach(stats, STEPS, report)
        return stats

    def shutdown(self) -> None:
        """See Scheduler."""
        self._costs.write()
        super().shutdown()


class AsyncCostModelScheduler(CostModelScheduler, AsyncScheduler):
    """The same over vLLM's scheduler for async scheduling."""
