"""What is counted, logged and traced of every request, in one place, when it has ended."""

from collections.abc import Callable
from time import time_ns
from typing import TYPE_CHECKING

from deepinfer_router.access_log import AccessLog
from deepinfer_router.api import Api, api_of
from deepinfer_router.exchange import Exchange
from deepinfer_router.journey import Journey
from deepinfer_router.metrics import TOKENS, Counter, Histogram, counter, histogram
from deepinfer_router.request import Request
from deepinfer_router.telemetry_config import AccessLogConfig, TracingConfig
from deepinfer_router.tracing import TRACEPARENT, Sampler, Trace, continued

if TYPE_CHECKING:
    from deepinfer_router.trace_export import Ended, TraceExport

REQUESTS = counter(
    "requests", "Requests by API and status; 499: the client left before the answer began.", "api", "status"
)
DURATION = histogram("request_seconds", "From the end of a request's headers to the end of its answer.", "api")
FIRST_TOKEN = histogram(
    "first_token_seconds", "From a request's headers to the first piece of a streamed answer.", "api"
)
PROMPT_TOKENS = histogram("prompt_tokens", "Tokens of prompts: counted, or estimated from bytes.", buckets=TOKENS)
TENANT_TOKENS = counter("tenant_prompt_tokens", "Prompt tokens by tenant.", "tenant")
TENANT_HITS = counter("tenant_hit_tokens", "Those of them that the store had.", "tenant")
CLIENT_LEFT = 499


class Observer:
    """One a worker, on its event loop."""

    def __init__(self, log: AccessLogConfig, tracing: TracingConfig, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._log = AccessLog(log) if log.path else None
        self._export: TraceExport | None = None
        if tracing.endpoint:  # an HTTP client and what it brings
            from deepinfer_router import trace_export

            self._export = trace_export.TraceExport(tracing)
        self.traces = self._export is not None
        self._sampler = Sampler(tracing.sample_ratio)
        self._counts: dict[tuple[Api, int], tuple[Counter, Histogram, Histogram]] = {}
        self._prompts = PROMPT_TOKENS.labels()

    def begin(self, journey: Journey) -> None:
        """Trace it, perhaps: its engine is told. Where there are `traces`."""
        trace = self._sampler.trace(journey.exchange.header(TRACEPARENT))
        if trace is not None:
            journey.trace = trace
            journey.headers = continued(journey.headers, trace)

    def end(self, exchange: Exchange, request: Request | None, journey: Journey | None) -> None:
        """It has ended, however that came."""
        now = self._clock()
        api = request.api if request is not None else api_of(exchange.method, exchange.route)
        status = exchange.status or CLIENT_LEFT
        counts = self._counts.get((api, status))
        if counts is None:
            kind = api.kind
            counts = REQUESTS.labels(kind, str(status)), DURATION.labels(kind), FIRST_TOKEN.labels(kind)
            self._counts[api, status] = counts
        requests, duration, first_token = counts
        requests.value += 1
        duration.observe(now - exchange.received_at)
        if journey is not None:
            work = journey.request.work
            if journey.first_token_at and journey.request.stream:
                first_token.observe(journey.first_token_at - exchange.received_at)
            if api.generates:
                self._prompts.observe(work.prompt_tokens)
                TENANT_TOKENS.labels(work.tenant).value += work.prompt_tokens
                if work.hit_tokens:
                    TENANT_HITS.labels(work.tenant).inc(work.hit_tokens)
            if self._export is not None and journey.trace is not None:
                self._export.add(self._ended(exchange, journey, journey.trace, status, now))
        if self._log is not None and self._log.wanted(status):
            self._log.add(_line(exchange, request, journey, api, status, now))

    def reopen(self) -> None:
        """The access log's file has been moved away."""
        if self._log is not None:
            self._log.reopen()

    def close(self) -> None:
        """Write what there is, within seconds."""
        for sink in (self._log, self._export):
            if sink is not None:
                sink.close()

    def _ended(self, exchange: Exchange, journey: Journey, trace: Trace, status: int, now: float) -> "Ended":
        from deepinfer_router.trace_export import Ended

        work, api = journey.request.work, journey.request.api
        wall = time_ns() - int(now * 1e9)  # from the loop's clock to that of the calendar

        def at(moment: float) -> int:
            return wall + int(moment * 1e9) if moment else 0

        attributes = {
            "http.request.method": exchange.method.decode("latin-1"),
            "url.path": exchange.route.decode("latin-1"),
            "http.response.status_code": status,
            "gen_ai.operation.name": str(api.kind),
            "gen_ai.request.model": work.model,
            "deepinfer.request_id": journey.request.request_id.decode("latin-1"),
            "deepinfer.tenant": work.tenant,
            "deepinfer.prompt_tokens": work.prompt_tokens,
            "deepinfer.hit_tokens": work.hit_tokens,
            "deepinfer.outcome": journey.outcome,
        }
        return Ended(
            trace,
            f"{exchange.method.decode('latin-1')} {exchange.route.decode('latin-1')}",
            attributes,
            start_ns=at(exchange.received_at),
            sent_ns=at(journey.sent_at),
            first_token_ns=at(journey.first_token_at),
            end_ns=at(now),
            engine=journey.engine,
            error=status >= 500 or journey.outcome not in ("served", "rejected", "client_gone"),
        )


def _line(
    exchange: Exchange, request: Request | None, journey: Journey | None, api: Api, status: int, now: float
) -> dict[str, object]:
    line: dict[str, object] = {
        "time_ns": time_ns(),
        "peer": exchange.peer,
        "method": exchange.method.decode("latin-1"),
        "path": exchange.route.decode("latin-1"),
        "api": api.kind,
        "status": status,
        "seconds": round(now - exchange.received_at, 6),
    }
    if request is not None:
        work = request.work
        line |= {
            "request_id": request.request_id.decode("latin-1"),
            "key": request.identity.name,
            "tenant": work.tenant,
            "model": work.model,
            "stream": request.stream,
            "prompt_tokens": work.prompt_tokens,
            "hit_tokens": work.hit_tokens,
        }
    if journey is not None:
        line |= {"outcome": journey.outcome, "engine": journey.engine, "events": journey.events}
        if journey.first_token_at:
            line["first_token_seconds"] = round(journey.first_token_at - exchange.received_at, 6)
        if journey.rerouted or journey.resumes:
            line |= {"rerouted": bool(journey.rerouted), "resumes": journey.resumes}
        if journey.trace is not None:
            line["trace_id"] = journey.trace.trace_id.decode()
    return line
