"""What follows when an engine fails a request: another engine once, the rest of a stream from another, or an error."""

from collections.abc import Callable

from deepinfer_router.delivery import Delivery
from deepinfer_router.fleet import Fleet
from deepinfer_router.hop import HopFailed
from deepinfer_router.journey import Journey
from deepinfer_router.metrics import counter
from deepinfer_router.placement import Placed
from deepinfer_router.replacement import Replacement
from deepinfer_router.resuming import Resuming
from deepinfer_router.retry_budget import RetryBudget

FAILURES = counter("hop_failures", "Hops that an engine did not serve, by kind.", "kind")
REROUTES = counter("reroutes", "Requests sent to a second engine before their answer began, by what failed.", "kind")
DENIED = counter("reroutes_denied", "Requests not sent to a second engine, by why not.", "reason")

MOST_UNREACHED = 3
"""Engines that one request may find dead before it is sent to one."""


class Failover:
    """One reroute a request, before the first byte of its answer. Then only a resume can help."""

    def __init__(
        self,
        fleet: Fleet,
        replacement: Replacement,
        budget: RetryBudget,
        delivery: Delivery,
        resuming: Resuming,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._replacement = replacement
        self._budget = budget
        self._delivery = delivery
        self._resuming = resuming
        self._clock = clock

    def blame(self, journey: Journey, failure: HopFailed) -> None:
        """The engine is told of, and the request does not go there again."""
        FAILURES.labels(failure.kind).inc()
        engine = failure.engine
        if failure.kind == "pressure":
            self._fleet.pressured(engine)
        else:
            self._fleet.failed(engine, failure.kind)
        journey.request.work.excluded += (engine.id,)

    def may_reroute(self, journey: Journey, failure: HopFailed) -> bool:
        """Whether to ask a second engine; counted if so.

        An engine that could not be reached has had no part of it, so the next is no second one: dead ones are found out
        one by one. Lost connections are no sign of overload either; only answers and silence draw on the budget. So
        when an engine dies all its requests find another, and when all engines are full a tenth does.
        """
        now = self._clock()
        why = ""
        if now >= journey.deadline:
            why = "deadline"
        elif not failure.sent:
            journey.unreached += 1
            why = "unreached" if journey.unreached > MOST_UNREACHED else ""
        elif journey.rerouted:
            why = "second"
        elif failure.loads and not self._budget.take(now):
            why = "budget"
        if why:
            DENIED.labels(why).inc()
            return False
        journey.rerouted = journey.rerouted or failure.sent
        REROUTES.labels(failure.kind).inc()
        return True

    async def next(self, journey: Journey, failure: HopFailed) -> Placed | None:
        """Where to go on; None: the client has been told all that there is to tell. Raises Refusal."""
        rejected = failure.kind == "rejected"  # the request's fault: no engine is blamed, and none asked again
        if not rejected:
            self.blame(journey, failure)
        if journey.exchange.started:
            return await self._resuming.again(journey, failure)
        if rejected:
            self.give_up(journey, failure)
            return None
        if self.may_reroute(journey, failure):
            if journey.transcript is not None:
                journey.transcript = self._resuming.transcript(journey.request)
            placed = await self._replacement.find(journey)
            if placed is not None:
                return placed
            DENIED.labels("no_other").inc()
        self.give_up(journey, failure)
        return None

    def give_up(self, journey: Journey, failure: HopFailed) -> None:
        """Tell the client. Raises Refusal, to be told in the form of its API."""
        journey.outcome = failure.kind
        if failure.answer is None:
            raise failure.refusal()
        self._delivery.pass_on(journey, failure.answer)
