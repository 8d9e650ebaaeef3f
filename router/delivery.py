"""Brings an engine's answer to the client."""

from collections.abc import Callable
from typing import Any

from deepinfer_router import error_body
from deepinfer_router.failure_config import FailureConfig
from deepinfer_router.fleet import Fleet
from deepinfer_router.hop import Answer, HopFailed, ask, for_rank, judged
from deepinfer_router.http_client import UpstreamError, UpstreamResponse
from deepinfer_router.journey import Journey
from deepinfer_router.lease import Lease
from deepinfer_router.prefill_guess import PrefillGuess
from deepinfer_router.relay import Outcome, hand_over, relay
from deepinfer_router.sse import EventSplitter, EventTooLong
from deepinfer_router.transcript import Transcript
from deepinfer_router.upstreams import Upstreams
from deepinfer_router.usage import MARK, with_cached
from deepinfer_router.websocket import change

_EVENT_STREAM = b"text/event-stream"


class Delivery:
    """Asks the engine of a lease, and hands on what it says, as bytes where nothing has to be changed in them."""

    def __init__(self, fleet: Fleet, upstreams: Upstreams, config: FailureConfig, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._upstreams = upstreams
        self._config = config
        self._clock = clock
        self._guess = PrefillGuess()

    async def deliver(self, journey: Journey, lease: Lease, changes: dict[str, Any] | None, predicted_s: float) -> None:
        """The answer of the lease's target to the client, whole; the lease is released.

        Raises:
            HopFailed: it did not answer, or not to the end. Where the exchange has `started`, only a resume can follow.
        """
        exchange, request = journey.exchange, journey.request
        journey.sent_at = now = self._clock()
        engine = lease.target.engine
        journey.engine = engine.id
        if request.stream:
            patience = self.prefill_patience(journey, now, predicted_s)
        else:
            patience = max(0.001, journey.deadline - now)
        if exchange.upgrade is not None:
            found = await self._change(journey, lease, self.prefill_patience(journey, now, predicted_s))
            if found is None:
                return
            response = found
        else:
            if lease.seconds and not request.stream:
                self._guess.expect(lease, now + predicted_s)
            response = await ask(
                self._upstreams, lease, exchange.method, exchange.path, journey.headers, journey.body(changes), patience
            )
        journey.answering = lease
        try:
            transcript = journey.transcript
            if exchange.started and not (response.status < 400 and _is_stream(response)):
                raise HopFailed(engine, "status", f"engine {engine.id} answered {response.status} to a resume")
            if response.status >= 400:
                outcome = await relay(response, exchange, stall_s=self._config.stall_s)
            elif request.stream and _is_stream(response) and (transcript is not None or self._edits(journey)):
                outcome = await self._edited(journey, response, transcript, patience - (self._clock() - now))
            elif journey.cached_tokens is not None and not request.stream:
                outcome = await self._whole(journey, response)
            elif response.complete:
                outcome = hand_over(response, exchange, journey.seen if request.stream else journey.seen_whole)
            else:
                outcome = await relay(
                    response,
                    exchange,
                    on_data=journey.seen,
                    first_data_s=patience - (self._clock() - now),
                    stall_s=self._config.stall_of(request.work.model),
                )
        finally:
            if not response.complete:
                response.cancel()
            journey.answering = None
        if outcome == "complete":
            journey.outcome = "served" if response.status < 400 else "rejected"
            lease.release("done")
            if response.status < 400:
                self._fleet.succeeded(engine)
        elif outcome == "client_gone":
            journey.outcome = "client_gone"
            lease.release("cancelled")
        else:
            kind = "stalled" if outcome == "stalled" else "lost"
            raise HopFailed(engine, kind, f"engine {engine.id} did not end its answer ({kind})")

    async def _change(self, journey: Journey, lease: Lease, patience: float) -> UpstreamResponse | None:
        """Another protocol from here on: bytes, both ways; or what the engine answers instead. Raises HopFailed."""
        exchange, target = journey.exchange, lease.target
        lease.first_token()  # what will be asked over it is not known here, and it may last for hours
        upstream = self._upstreams.of(target.engine)
        try:
            response = await change(exchange, upstream, for_rank(target, journey.headers), patience)
        except UpstreamError as error:
            raise HopFailed(target.engine, error.kind, error.message, sent=error.sent) from error
        if response is not None:
            return await judged(target.engine, response, patience)
        journey.outcome = "client_gone" if exchange.closed else "served"
        lease.release("done")
        return None

    def prefill_patience(self, journey: Journey, now: float, predicted_s: float) -> float:
        """Seconds that a prefill may take, which is a stream's first token: a few times what is predicted, at least
        some."""
        left = max(0.001, journey.deadline - now)
        return min(left, max(self._config.first_token_s, self._config.first_token_factor * predicted_s))

    def pass_on(self, journey: Journey, answer: Answer) -> None:
        """An engine's own answer that it cannot serve, for nobody else can."""
        headers = [header for header in answer.headers if header[0] != b"content-length"]
        if answer.status in (429, 503) and not any(name == b"retry-after" for name, _ in headers):
            headers.append((b"retry-after", b"1"))
        journey.exchange.respond(answer.status, headers, answer.body)

    def break_off(self, journey: Journey, code: str, message: str) -> None:
        """End an answer that has begun so that its client sees that it is not whole: no end mark, nor the body's."""
        exchange = journey.exchange
        if journey.request.stream:
            exchange.write(error_body.event(journey.request.api, code, message))
            exchange.cut()
        else:
            exchange.abort()

    def _edits(self, journey: Journey) -> bool:
        """Whether the end of a stream says something that is to be changed."""
        if journey.cached_tokens is None:
            return False
        options = journey.request.fields.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    async def _whole(self, journey: Journey, response: UpstreamResponse) -> Outcome:
        try:
            body = await response.read(1 << 30, stall_s=self._config.stall_of(journey.request.work.model))
        except UpstreamError as error:
            return "stalled" if error.kind == "timeout" else "upstream_lost"
        if journey.cached_tokens is not None:
            body = with_cached(body, journey.cached_tokens)
        headers = [header for header in response.headers if header[0] != b"content-length"]
        journey.exchange.respond(response.status, headers, body)
        journey.seen(body)
        return "complete"

    async def _edited(
        self, journey: Journey, response: UpstreamResponse, transcript: Transcript | None, first_data_s: float
    ) -> Outcome:
        """A stream event by event: recorded, and with another number of cached tokens."""
        exchange, splitter, cached = journey.exchange, EventSplitter(), journey.cached_tokens
        stall_s = self._config.stall_of(journey.request.work.model)
        try:
            async for data in response.pieces(first_data_s=max(0.001, first_data_s), stall_s=stall_s):
                events = splitter.feed(data)
                journey.seen(b"".join(events))
                if transcript is not None:
                    events = [transcript.forward(event) for event in events]
                told = b"".join(events)
                if cached is not None and MARK in told:
                    told = with_cached(told, cached)
                if told:
                    if not exchange.started:
                        exchange.start(response.status, response.headers)
                    exchange.write(told)
                    if exchange.paused:
                        await exchange.drain()
                if transcript is not None and transcript.failed:
                    return "upstream_lost"
                if exchange.closed:
                    return "client_gone"
        except UpstreamError as error:
            return "stalled" if error.kind == "timeout" else "upstream_lost"
        except EventTooLong:
            return "upstream_lost"
        if transcript is not None and not transcript.done:
            return "upstream_lost"
        if not exchange.started:
            exchange.start(response.status, response.headers)
        exchange.end()
        return "complete"


def _is_stream(response: UpstreamResponse) -> bool:
    kind = response.header(b"content-type")
    return kind is not None and kind.startswith(_EVENT_STREAM)
