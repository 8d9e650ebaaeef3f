"""Trace contexts as W3C has them, and spans as a collector gets them."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
import pytest
from routed import routed
from scripted_engine import answer, streamed
from scripted_stream import stream

from deepinfer_router import trace_export
from deepinfer_router.api import Kind
from deepinfer_router.telemetry_config import TracingConfig
from deepinfer_router.trace_export import TraceExport
from deepinfer_router.tracing import Sampler, Trace, continued, parse

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (GIVEN, (TRACE_ID, SPAN_ID, True)),
        (f"00-{TRACE_ID}-{SPAN_ID}-00", (TRACE_ID, SPAN_ID, False)),
        (f" 00-{TRACE_ID}-{SPAN_ID}-03 ", (TRACE_ID, SPAN_ID, True)),
        (f"cc-{TRACE_ID}-{SPAN_ID}-01-what-comes-later", (TRACE_ID, SPAN_ID, True)),
        (f"00-{TRACE_ID}-{SPAN_ID}-01-more", None),
        (f"ff-{TRACE_ID}-{SPAN_ID}-01", None),
        (f"00-{'0' * 32}-{SPAN_ID}-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
        (GIVEN.upper(), None),
        (GIVEN[:-1], None),
        ("", None),
        ("\xff" * 55, None),
    ],
)
def test_traceparents_are_read(text: str, found: tuple[str, str, bool] | None) -> None:
    parsed = parse(text.encode("latin-1"))
    assert parsed == (found and (found[0].encode(), found[1].encode(), found[2]))


def test_what_a_trace_tells_the_engine_is_a_traceparent() -> None:
    trace = Trace(TRACE_ID.encode(), SPAN_ID.encode())
    assert parse(trace.traceparent()) == (TRACE_ID.encode(), trace.hop_id, True)
    assert len({trace.span_id, trace.hop_id, trace.parent_id}) == 3


def test_a_client_that_has_decided_is_followed() -> None:
    never, always = Sampler(0.0), Sampler(1.0)
    followed = never.trace(GIVEN.encode())
    assert followed is not None and followed.trace_id == TRACE_ID.encode()
    assert always.trace(f"00-{TRACE_ID}-{SPAN_ID}-00".encode()) is None
    assert never.trace(None) is None
    fresh = always.trace(b"nonsense")
    assert fresh is not None and fresh.parent_id == b"" and len(fresh.trace_id) == 32


def test_the_state_of_a_trace_goes_on_with_it_alone() -> None:
    headers = [(b"traceparent", b"x"), (b"tracestate", b"a=1"), (b"accept", b"*/*")]
    going_on, new = Trace(TRACE_ID.encode(), SPAN_ID.encode()), Trace(TRACE_ID.encode(), b"")
    assert continued(headers, going_on) == [*headers[1:], (b"traceparent", going_on.traceparent())]
    assert continued(headers, new) == [headers[2], (b"traceparent", new.traceparent())]


class Collector(ThreadingHTTPServer):
    """Keeps what is posted to it."""

    daemon_threads = True
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Post)
        self.posts: list[tuple[str, dict[str, str], Any]] = []

    def spans(self) -> list[dict[str, Any]]:
        found = []
        for _, _, body in self.posts:
            for resource in body["resourceSpans"]:
                assert resource["resource"]["attributes"][0]["key"] == "service.name"
                found += [span for scope in resource["scopeSpans"] for span in scope["spans"]]
        return found


class _Post(BaseHTTPRequestHandler):
    server: Collector

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.posts.append((self.path, headers, orjson.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()


def section(collector: Collector, **more: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces?x=1"
    return {"endpoint": url, "headers": {"Authorization": "Bearer t"}, "interval_s": 0.02, "sample_ratio": 0, **more}


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {entry["key"]: next(iter(entry["value"].values())) for entry in span["attributes"]}


def test_a_request_is_two_spans_of_the_clients_trace(collector: Collector) -> None:
    events = stream(Kind.CHAT, [1, 2], [0, 1, 0], with_ids=False)

    async def main() -> None:
        async with routed([streamed(events)], tracing=section(collector)) as router:
            headers = {"traceparent": GIVEN, "tracestate": "a=1", "x-request-id": "mine"}
            assert (await router.ask(headers=headers, stream=True)).status == 200
            asked = router.engines[0].asked[0].headers
            assert asked["traceparent"].startswith(f"00-{TRACE_ID}-") and asked["traceparent"] != GIVEN
            assert asked["tracestate"] == "a=1"
            hop = asked["traceparent"].split("-")[2]
        own, below = collector.spans()  # closing has sent them
        assert (own["traceId"], own["parentSpanId"], own["kind"]) == (TRACE_ID, SPAN_ID, 2)
        assert (below["traceId"], below["parentSpanId"], below["spanId"]) == (TRACE_ID, own["spanId"], hop)
        assert own["name"] == "POST /v1/chat/completions"
        told = attributes(own)
        assert told["deepinfer.request_id"] == "mine" and told["gen_ai.request.model"] == "m"
        assert told["http.response.status_code"] == "200" and told["deepinfer.outcome"] == "served"
        assert attributes(below)["server.address"] == "prefill-decode-0"
        start, sent, end = (int(own["startTimeUnixNano"]), int(below["startTimeUnixNano"]), int(own["endTimeUnixNano"]))
        assert start <= sent <= end == int(below["endTimeUnixNano"])
        assert 0 < attributes(below)["deepinfer.first_token_seconds"] <= (end - sent) / 1e9
        path, sent_headers, _ = collector.posts[0]
        assert path == "/v1/traces?x=1" and sent_headers["authorization"] == "Bearer t"

    asyncio.run(main())


def test_what_is_not_sampled_goes_on_as_it_came(collector: Collector) -> None:
    given = f"00-{TRACE_ID}-{SPAN_ID}-00"

    async def main() -> None:
        async with routed([answer()], tracing=section(collector)) as router:
            await router.ask(headers={"traceparent": given})
            await router.ask()
            first, second = router.engines[0].asked
            assert first.headers["traceparent"] == given
            assert "traceparent" not in second.headers

    asyncio.run(main())
    assert collector.posts == []


def test_without_an_endpoint_a_traceparent_goes_on_as_it_came() -> None:
    async def main() -> None:
        async with routed([answer()]) as router:
            await router.ask(headers={"traceparent": GIVEN, "tracestate": "a=1"})
            asked = router.engines[0].asked[0].headers
            assert (asked["traceparent"], asked["tracestate"]) == (GIVEN, "a=1")

    asyncio.run(main())


@pytest.mark.parametrize("status", [500, 0])
def test_a_collector_in_trouble_costs_spans_and_nothing_else(collector: Collector, status: int) -> None:
    collector.status = status or 200
    settings = section(collector, sample_ratio=1)
    if not status:
        settings["endpoint"] = "http://127.0.0.1:9/v1/traces"
    before = trace_export.SPANS.labels("failed").value

    async def main() -> None:
        async with routed([answer()], tracing=settings) as router:
            assert (await router.ask()).status == 200

    asyncio.run(main())
    assert trace_export.SPANS.labels("failed").value == before + 2


def test_spans_that_do_not_fit_are_dropped_and_counted() -> None:
    config = TracingConfig.model_validate({"endpoint": "http://127.0.0.1:9/", "max_spans": 2, "interval_s": 60})
    export = TraceExport(config)
    before = trace_export.SPANS.labels("dropped").value
    for _ in range(5):
        export.add(None)  # type: ignore[arg-type] # none is sent
    assert trace_export.SPANS.labels("dropped").value == before + 3
