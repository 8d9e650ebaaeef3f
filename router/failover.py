"""What follows when an engine fails a request: another engine once, the rest of a stream from another, or an error."""

from collections.abc import Callable

from deepinfer_router.delivery import Delivery
from deepinfer_router.errors import Refusal
from deepinfer_router.fleet import Fleet
from deepinfer_router.hop import HopFailed
from deepinfer_router.journey import Journey
from deepinfer_router.metrics import counter
from deepinfer_router.placement import Placed
from deepinfer_router.replacement import Replacement
from deepinfer_router.resuming import Resuming
from deepinfer_router.retry_budget import RetryBudget
from deepinfer_router.roles import Role

FAILURES = counter("hop_failures", "Hops that an engine did not serve, by kind.", "kind")
REROUTES = counter("reroutes", "Requests sent to a second engine before their answer began, by what failed.", "kind")
DENIED = counter("reroutes_denied", "Requests not sent to a second engine, by why not.", "reason")


class Failover:
    """One reroute of a prefill and one of an answer, before the answer's first byte. Then only a resume can help."""

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
            self._fleet.failed(engine, failure.kind, unreachable=failure.kind == "connect")
        journey.request.work.excluded += (engine.id,)

    def may_reroute(self, journey: Journey, failure: HopFailed, role: Role) -> bool:
        """Whether to ask a second engine for what `role` does; counted if so.

        An engine that could not be reached has had no part of it, so the next is no second one: dead ones are found out
        one by one. Lost connections are no sign of overload either; only answers and silence draw on the budget. So
        when an engine dies all its requests find another, when one of each role dies too, and when all engines are full
        a tenth does.
        """
        now = self._clock()
        why = ""
        if now >= journey.deadline:
            why = "deadline"
        elif failure.sent and role in journey.rerouted:
            why = "second"
        elif failure.loads and not self._budget.take(now):
            why = "budget"
        if why:
            DENIED.labels(why).inc()
            return False
        if failure.sent:
            journey.rerouted.add(role)
        REROUTES.labels(failure.kind).inc()
        return True

    async def next(self, journey: Journey, failure: HopFailed, role: Role) -> Placed | None:
        """Where to go on after what `role` does has failed; None: the client has been told all that there is to tell.
        Raises Refusal."""
        rejected = failure.kind == "rejected"  # the request's fault: no engine is blamed, and none asked again
        if not rejected:
            self.blame(journey, failure)
        if journey.exchange.started:
            return await self._resuming.again(journey, failure)
        if rejected:
            self.give_up(journey, failure)
            return None
        if self.may_reroute(journey, failure, role):
            if journey.transcript is not None:
                journey.transcript = self._resuming.transcript(journey.request)
            try:
                placed = await self._replacement.find(journey)
            except Refusal:
                DENIED.labels("no_room").inc()
                if failure.answer is None:  # else the engine's own says as much
                    journey.outcome = failure.kind
                    raise
            else:
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
