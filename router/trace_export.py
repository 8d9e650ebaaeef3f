"""Sends spans to a collector: OTLP over HTTP as JSON (https://opentelemetry.io/docs/specs/otlp/), from a thread.

The SDK of OpenTelemetry would do it for 20 MB and a span's worth of locks on the path of each request.
"""

from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import orjson

from deepinfer_router.background_writer import BackgroundWriter
from deepinfer_router.metrics import counter
from deepinfer_router.telemetry_config import TracingConfig
from deepinfer_router.tracing import Trace, span

SPANS = counter("spans", "Spans by what became of them: exported, dropped (too many waited), failed.", "result")
_EXPORTED, _DROPPED, _FAILED = SPANS.labels("exported"), SPANS.labels("dropped"), SPANS.labels("failed")
_BATCH = 512
_TIMEOUT_S = 5.0


class Ended:
    """What is known of a traced request at its end; made into spans in the thread."""

    __slots__ = ("attributes", "end_ns", "engine", "error", "first_token_ns", "name", "sent_ns", "start_ns", "trace")

    def __init__(
        self,
        trace: Trace,
        name: str,
        attributes: dict[str, Any],
        *,
        start_ns: int,
        sent_ns: int,
        first_token_ns: int,
        end_ns: int,
        engine: str,
        error: bool,
    ) -> None:
        """Times in nanoseconds since the epoch; `sent_ns` 0: no engine was asked."""
        self.trace, self.name, self.attributes = trace, name, attributes
        self.start_ns, self.sent_ns, self.first_token_ns, self.end_ns = start_ns, sent_ns, first_token_ns, end_ns
        self.engine, self.error = engine, error

    def spans(self) -> list[dict[str, Any]]:
        """The router's, and the engine's below it."""
        trace, end = self.trace, self.end_ns
        found = [span(trace, self.name, self.start_ns, end, self.attributes, hop=False, error=self.error)]
        if self.sent_ns:
            seen: dict[str, Any] = {"server.address": self.engine}
            if self.first_token_ns:
                seen["deepinfer.first_token_seconds"] = (self.first_token_ns - self.sent_ns) / 1e9
            found.append(span(trace, "engine", self.sent_ns, end, seen, hop=True, error=self.error))
        return found


class TraceExport:
    """Exports for as long as the worker lives."""

    def __init__(self, config: TracingConfig) -> None:
        self._config = config
        self._url = urlsplit(config.endpoint)
        resource = {"service.name": config.service_name}
        self._resource = [{"key": key, "value": {"stringValue": value}} for key, value in resource.items()]
        self._writer = BackgroundWriter(
            "trace export", self._send, _DROPPED.inc, most=config.max_spans, interval_s=config.interval_s
        )
        self.add = self._writer.add
        """Takes an `Ended` request."""
        self.close = self._writer.close

    def _send(self, ended: list[Ended]) -> None:
        for first in range(0, len(ended), _BATCH):
            spans = [made for one in ended[first : first + _BATCH] for made in one.spans()]
            scope = {"scope": {"name": "deepinfer.router"}, "spans": spans}
            body = orjson.dumps(
                {"resourceSpans": [{"resource": {"attributes": self._resource}, "scopeSpans": [scope]}]}
            )
            (_EXPORTED if self._post(body) else _FAILED).inc(len(spans))

    def _post(self, body: bytes) -> bool:
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        try:
            connection = kind(str(self._url.hostname), self._url.port, timeout=_TIMEOUT_S)
            try:
                path = self._url.path or "/v1/traces"
                headers = {"content-type": "application/json", **self._config.headers}
                connection.request("POST", path + (f"?{self._url.query}" if self._url.query else ""), body, headers)
                return 200 <= connection.getresponse().status < 300
            finally:
                connection.close()
        except (OSError, HTTPException, ValueError):
            return False
