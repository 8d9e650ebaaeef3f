"""W3C trace contexts (https://www.w3.org/TR/trace-context/): read, continued, and which requests are traced.

Without an endpoint nothing here runs: a client's `traceparent` reaches the engine as it came.
"""

import re
from random import getrandbits, random
from typing import Any

from deepinfer_router.http_headers import Headers

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
_SAMPLED = 1
_SERVER, _CLIENT = 2, 3  # kinds of spans
TRACEPARENT = b"traceparent"


class Trace:
    """The spans of one request: the router's, and below it that of the engine that answers."""

    __slots__ = ("hop_id", "parent_id", "span_id", "trace_id")

    def __init__(self, trace_id: bytes, parent_id: bytes) -> None:
        self.trace_id = trace_id
        """32 hexadecimal digits."""
        self.parent_id = parent_id
        """16, of the client's span; empty: the router's is the first."""
        self.span_id = b"%016x" % (getrandbits(64) or 1)
        self.hop_id = b"%016x" % (getrandbits(64) or 1)

    def traceparent(self) -> bytes:
        """What the engine gets."""
        return b"00-%b-%b-01" % (self.trace_id, self.hop_id)


class Sampler:
    """Decides which requests are traced: a client that has decided is followed, of the others a share."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def trace(self, traceparent: bytes | None) -> Trace | None:
        """Its trace; None: it is not traced, and what the client sent is passed on."""
        if traceparent is not None and (given := parse(traceparent)):
            trace_id, parent_id, sampled = given
            return Trace(trace_id, parent_id) if sampled else None
        if random() >= self._ratio:
            return None
        return Trace(b"%032x" % (getrandbits(128) or 1), b"")


def parse(traceparent: bytes) -> tuple[bytes, bytes, bool] | None:
    """Trace id, span id and whether it is sampled; None: it is to be ignored."""
    match = _TRACEPARENT.match(traceparent.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return trace_id, span_id, bool(int(flags, 16) & _SAMPLED)


def continued(headers: Headers, trace: Trace) -> Headers:
    """Headers for the engine, whose spans are to hang below the router's. `tracestate` goes on as it came."""
    kept = [header for header in headers if header[0] != TRACEPARENT]
    if not trace.parent_id:  # the state of a trace that is not continued
        kept = [header for header in kept if header[0] != b"tracestate"]
    return [*kept, (TRACEPARENT, trace.traceparent())]


def span(
    trace: Trace,
    name: str,
    start_ns: int,
    end_ns: int,
    attributes: dict[str, Any],
    *,
    hop: bool,
    error: bool,
) -> dict[str, Any]:
    """One span in OTLP's JSON. `hop`: the engine's, below the router's own."""
    parent = trace.span_id if hop else trace.parent_id
    return {
        "traceId": trace.trace_id.decode(),
        "spanId": (trace.hop_id if hop else trace.span_id).decode(),
        **({"parentSpanId": parent.decode()} if parent else {}),
        "name": name,
        "kind": _CLIENT if hop else _SERVER,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(end_ns),
        "attributes": [{"key": key, "value": _value(value)} for key, value in attributes.items()],
        "status": {"code": 2} if error else {},
    }


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
