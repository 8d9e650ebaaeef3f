"""From a client's request to its answer."""

import asyncio
from collections.abc import Callable
from functools import partial

from deepinfer_router import error_body
from deepinfer_router.admission import AT_ONCE, Admission
from deepinfer_router.api import Api, Kind, api_of
from deepinfer_router.delivery import Delivery
from deepinfer_router.disaggregated import Disaggregated
from deepinfer_router.encode import Encoding
from deepinfer_router.entry import Entry
from deepinfer_router.errors import Refusal
from deepinfer_router.exchange import Exchange
from deepinfer_router.expected_output import ExpectedOutput
from deepinfer_router.failover import Failover
from deepinfer_router.failure_config import FailureConfig
from deepinfer_router.fleet import Fleet
from deepinfer_router.hop import HopFailed
from deepinfer_router.http_server import STOPPING
from deepinfer_router.journey import Journey
from deepinfer_router.model_list import ModelList
from deepinfer_router.observer import Observer
from deepinfer_router.placement import Placed, Placer, give_back
from deepinfer_router.resume import hop_changes
from deepinfer_router.resuming import Resuming
from deepinfer_router.retry_budget import RetryBudget
from deepinfer_router.usage import find_usage

HEALTH = b"/health"
"""Answered here, for load balancers in front: whether there is an engine."""


class Flow:
    """The order in which a request meets entry, admission, policies, engines and, where they fail, others."""

    def __init__(
        self,
        entry: Entry,
        fleet: Fleet,
        placer: Placer,
        delivery: Delivery,
        disaggregated: Disaggregated,
        encoding: Encoding,
        failover: Failover,
        resuming: Resuming,
        models: ModelList,
        budget: RetryBudget,
        admission: Admission,
        observer: Observer,
        config: FailureConfig,
        clock: Callable[[], float],
    ) -> None:
        self._entry = entry
        self._fleet = fleet
        self._placer = placer
        self._delivery = delivery
        self._disaggregated = disaggregated
        self._encoding = encoding
        self._failover = failover
        self._resuming = resuming
        self._models = models
        self._budget = budget
        self._admission = admission
        self._observer = observer
        self._expected = ExpectedOutput()
        self._config = config
        self._clock = clock

    async def handle(self, exchange: Exchange) -> None:
        """Answer it. As soon as the client has gone everything done for it is cancelled."""
        if exchange.route == HEALTH:
            exchange.respond(503 if self._nobody() else 200, [], b"")
            return
        exchange.on_close(exchange.task.cancel)
        request = journey = None
        try:
            request = self._entry.read(exchange)
            await self._entry.prepare(request)
            deadline = request.work.deadline
            if deadline is None:
                deadline = exchange.received_at + self._config.request_timeout_s
            journey = Journey(exchange, request, deadline, self._clock)
            if self._observer.traces:
                self._observer.begin(journey)
            await self._serve(journey)
        except Refusal as refusal:
            self._refuse(exchange, request.api if request else api_of(exchange.method, exchange.route), refusal)
        except asyncio.CancelledError:
            if journey is not None and exchange.started and not exchange.closed and not exchange.ended:
                self._delivery.break_off(journey, "shutting_down", STOPPING)
            raise
        finally:
            if request is not None:
                request.release()
            self._observer.end(exchange, request, journey)

    async def _serve(self, journey: Journey) -> None:
        now = self._clock()
        self._budget.request(now)
        if journey.request.api.kind is Kind.MODELS and self._models.several():
            await self._models.answer(journey)
            return
        placed: Placed | None = await self._begin(journey, now)
        try:
            while placed is not None:
                try:
                    if placed.prefill is None:
                        await self._delivery.deliver(journey, placed.decode, None, placed.pick.predicted_seconds)
                        if journey.request.stream:
                            self._learn(journey, placed)
                    else:
                        await self._disaggregated.run(journey, placed)
                    break
                except HopFailed as failure:
                    placed.release(failure.kind)
                    placed = await self._failover.next(journey, failure, placed.role_of(failure.engine))
        finally:
            if placed is not None:
                placed.release("cancelled")
            self._account(journey)

    async def _begin(self, journey: Journey, now: float) -> Placed:
        """Its first place. Raises Refusal."""
        request = journey.request
        work, api = request.work, request.api
        if not api.generates:
            return self._or_refuse(self._placer.any(work), work.model)
        shape = self._placer.shape(work.model)
        if not shape.prefill and not shape.decode and not self._fleet.serves(work.model):
            raise _unknown(work.model)
        name = request.identity.name
        work.expected_output = self._expected.estimate(work.model, name, work.max_tokens)
        if work.images and self._encoding.wanted(work):
            await self._encoding.run(journey)
        journey.splits = shape.split and self._disaggregated.handover.splits(api, request.fields)
        if self._resuming.wanted(request):
            journey.transcript = self._resuming.transcript(request)
            journey.changes = {**journey.changes, **hop_changes(api.kind)}
        if journey.splits or journey.transcript is not None:
            journey.read_here()
        seconds = self._placer.arrive(work, shape, now)
        admission = self._admission
        if admission.at_once(work):
            placed = self._placer.place(work, journey.splits)
            if placed is not None:
                AT_ONCE.value += 1
                return placed
        return await admission.wait(work, seconds, partial(self._placer.place, work, journey.splits), give_back)

    def _or_refuse(self, placed: Placed | None, model: str) -> Placed:
        if placed is not None:
            return placed
        if model and not self._fleet.serves(model):
            raise _unknown(model)
        raise Refusal(503, "no_engine", "no engine has room for this request now; try again", retry_after_s=1)

    def _learn(self, journey: Journey, placed: Placed) -> None:
        """How long its first token took: of a stream that one engine served, from its beginning."""
        if journey.first_token_at and journey.outcome == "served" and not journey.resumes:
            seconds = journey.first_token_at - journey.sent_at
            self._placer.served(placed.pick, journey.request.work, seconds)

    def _account(self, journey: Journey) -> None:
        """What its tokens say: to its key's limits, and to estimates of what is to come."""
        request = journey.request
        usage = find_usage(journey.usage_in) if journey.usage_in else None
        if usage is None:
            if journey.events:
                request.used(request.prompt_charged, journey.events)
            return
        request.used(usage.prompt_tokens, usage.completion_tokens)
        if journey.outcome == "served":
            self._expected.observe(request.work.model, request.identity.name, usage.completion_tokens)

    def _nobody(self) -> bool:
        """Whether no engine would get a request."""
        shape = self._placer.shape("")
        return not shape.decode

    def _refuse(self, exchange: Exchange, api: Api, refusal: Refusal) -> None:
        if not exchange.closed:
            exchange.respond(*error_body.render(refusal, api))


def _unknown(model: str) -> Refusal:
    return Refusal(404, "model_not_found", f"no engine serves the model {model!r}", param="model")
