"""A request whose prompt one engine computes and whose answer another gives."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import orjson

from deepinfer_router.bootstrap import Bootstrap
from deepinfer_router.delivery import Delivery
from deepinfer_router.failover import Failover
from deepinfer_router.fleet import Fleet
from deepinfer_router.handover import Handover, Params
from deepinfer_router.hop import Answer, HopFailed, ask
from deepinfer_router.http_client import UpstreamError
from deepinfer_router.journey import Journey
from deepinfer_router.lease import Lease
from deepinfer_router.metrics import counter
from deepinfer_router.placement import Placed, Placer
from deepinfer_router.roles import Role
from deepinfer_router.upstreams import Upstreams

PREFILLS = counter("prefill_hops", "Prefills at an engine of their own, by how they ended.", "outcome")
FREED = counter("prefills_freed", "Prefills whose client left before their decode, freed through a decode engine.")
_MAX_ANSWER_BYTES = 64 << 20
_FREE_S = 10.0

logger = logging.getLogger(__name__)


class Disaggregated:
    """Two hops a request. The decode engine's place is kept before the prefill is asked."""

    def __init__(
        self,
        handover: Handover,
        fleet: Fleet,
        placer: Placer,
        upstreams: Upstreams,
        delivery: Delivery,
        failover: Failover,
        bootstrap: Bootstrap | None,
        clock: Callable[[], float],
    ) -> None:
        """`bootstrap`: for connectors whose prefill engines are asked for their ids first."""
        self.handover = handover
        self._fleet = fleet
        self._placer = placer
        self._upstreams = upstreams
        self._delivery = delivery
        self._failover = failover
        self._bootstrap = bootstrap
        self._clock = clock
        self._freeing: set[asyncio.Task[None]] = set()

    async def run(self, journey: Journey, placed: Placed) -> None:
        """Both hops. Raises HopFailed: of the decode, or of two that run at once; Refusal: nobody can prefill it."""
        assert placed.prefill is not None
        if self.handover.concurrent:
            await self._both(journey, placed, placed.prefill)
            return
        answer = await self._prefill(journey, placed)
        if answer is None:
            return
        params = self.handover.decode(journey.params, answer, "", placed.prefill.target)
        try:
            await self._delivery.deliver(
                journey, placed.decode, {"kv_transfer_params": params} if params else None, 0.0
            )
        except asyncio.CancelledError:
            # Where the decode engine was asked, leaving it frees the blocks too; asking once more is harmless.
            if self.handover.pinned(answer) and not placed.decode.held_tokens:
                self._free(journey, placed.decode, params)
            raise

    async def close(self) -> None:
        """Wait for what is being freed."""
        if self._freeing:
            await asyncio.wait(self._freeing, timeout=_FREE_S)

    async def _prefill(self, journey: Journey, placed: Placed) -> Params | None:
        """Its answer, empty where the decode engine is to compute the prompt; None: the client was answered."""
        while True:
            lease = placed.prefill
            assert lease is not None
            asked_at = self._clock()
            try:
                said = await self._ask(journey, lease, placed.pick.predicted_seconds, "")
            except HopFailed as failure:
                lease.release(failure.kind)
                PREFILLS.labels(failure.kind).inc()
                again = self._failover.may_reroute(journey, failure, Role.PREFILL)
                if not again and journey.exchange.started:
                    raise  # to where it is blamed, and the stream ended
                self._failover.blame(journey, failure)
                if not again:
                    self._failover.give_up(journey, failure)
                    placed.decode.release("unused")
                    return None
                another = self._placer.another_prefill(journey.request.work)
                if another is None:
                    return {}
                placed.prefill, placed.pick = another
                continue
            lease.release("done")
            if said.status < 400:
                self._fleet.succeeded(lease.target.engine)
            else:
                PREFILLS.labels("rejected").inc()
                if journey.exchange.started:
                    raise HopFailed(lease.target.engine, "rejected", "the prefill was rejected", answer=said)
                journey.outcome = "rejected"
                self._delivery.pass_on(journey, said)
                placed.decode.release("unused")
                return None
            PREFILLS.labels("done").inc()
            self._placer.served(placed.pick, journey.request.work, self._clock() - asked_at)
            return self._read(journey, said.body)

    async def _ask(self, journey: Journey, lease: Lease, predicted_s: float, transfer: str) -> Answer:
        """A prefill's whole answer, with a status below 500 other than 429. Raises HopFailed."""
        request, exchange = journey.request, journey.exchange
        body = journey.body(self.handover.prefill(request.api, request.fields, journey.params, transfer))
        patience = self._delivery.prefill_patience(journey, self._clock(), predicted_s)
        response = await ask(self._upstreams, lease, exchange.method, exchange.path, journey.headers, body, patience)
        try:
            said = await response.read(_MAX_ANSWER_BYTES, stall_s=patience)
        except UpstreamError as error:
            raise HopFailed(lease.target.engine, error.kind, error.message) from error
        return Answer(response.status, response.headers, said)

    def _read(self, journey: Journey, body: bytes) -> Params:
        try:
            said = orjson.loads(body)
            usage = said.get("usage") or {}
            details: Any = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            params = said.get("kv_transfer_params")
        except (orjson.JSONDecodeError, AttributeError):
            return {}
        if isinstance(details.get("cached_tokens"), int):
            journey.cached_tokens = details["cached_tokens"]
        return params if isinstance(params, dict) else {}

    async def _both(self, journey: Journey, placed: Placed, prefill: Lease) -> None:
        """Prefill and decode at once. A failed prefill ends the decode, which would wait for it."""
        assert self._bootstrap is not None
        target = prefill.target
        try:
            await self._bootstrap.learn(target.engine)
        except UpstreamError as error:
            raise HopFailed(target.engine, error.kind, error.message, sent=False) from error
        transfer = uuid4().hex
        params = self.handover.decode(journey.params, {}, transfer, target)
        deciding = asyncio.current_task()
        assert deciding is not None
        failure: HopFailed | None = None

        async def prefilling() -> None:
            nonlocal failure
            try:
                said = await self._ask(journey, prefill, placed.pick.predicted_seconds, transfer)
                if said.status >= 400:
                    failure = HopFailed(target.engine, "rejected", "the prefill was rejected", answer=said)
            except HopFailed as error:
                failure = error
            PREFILLS.labels("done" if failure is None else failure.kind).inc()
            prefill.release("done" if failure is None else failure.kind)
            if failure is None:
                self._fleet.succeeded(target.engine)
            elif not journey.exchange.closed:
                deciding.cancel()

        hop = asyncio.create_task(prefilling())
        try:
            await self._delivery.deliver(
                journey, placed.decode, {"kv_transfer_params": params}, placed.pick.predicted_seconds
            )
        except asyncio.CancelledError:
            if failure is None or journey.exchange.closed:
                raise
            deciding.uncancel()
            self._bootstrap.forget(target.engine)  # it may be another life of it
            raise failure from None
        finally:
            hop.cancel()

    def _free(self, journey: Journey, decode: Lease, params: Params) -> None:
        """Let the prefill engine's blocks go: by a request to the decode engine that is cancelled, which tells it."""
        task = asyncio.create_task(self._ask_and_leave(journey, decode, params))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    async def _ask_and_leave(self, journey: Journey, decode: Lease, params: Params) -> None:
        body = journey.body({"kv_transfer_params": params, "stream": True})
        exchange = journey.exchange
        try:
            response = await ask(
                self._upstreams, decode, exchange.method, exchange.path, journey.headers, body, _FREE_S
            )
        except HopFailed as failure:
            logger.warning("blocks of a prefill stay until their time is over: %s", failure.message)
            return
        response.cancel()
        FREED.labels().inc()
