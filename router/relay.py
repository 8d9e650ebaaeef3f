"""Hands an engine's answer on to a client while it comes.

Bodies are not changed. Pieces are framed anew, one chunk a read: decoding a chunk and writing another takes less than
half a microsecond, and what a client has is then always whole chunks, and of a stream of events whole events, so that
after a loss an error event or the rest from another engine can follow.
"""

import asyncio
from collections.abc import Callable
from typing import Literal

from deepinfer_router.exchange import Exchange
from deepinfer_router.http_client import UpstreamError, UpstreamResponse

Outcome = Literal["complete", "upstream_lost", "client_gone", "stalled"]

_WHOLE_BYTES = 256 << 10
"""An answer of at most so many bytes, its length known, is sent when it is whole, so that until then another engine's
can take its place."""
_EVENT_BYTES = 1 << 20
"""A longer event is handed on in pieces."""


async def relay(
    response: UpstreamResponse,
    exchange: Exchange,
    *,
    on_data: Callable[[bytes], None] | None = None,
    stall_s: float | None = None,
    first_data_s: float | None = None,
) -> Outcome:
    """Hand `response` on to `exchange`, and tell how that ended. What is written is told to `on_data`, without framing.

    The head is sent with the first piece of the body. After "upstream_lost", and "stalled" (the first piece took longer
    than `first_data_s`, or a later one longer than `stall_s`), the exchange is still open: if it has not `started`
    another answer may be given, else it can be written on, or aborted. A client that goes takes the engine's work with
    it at once.
    """
    if exchange.closed:
        response.cancel()
        return "client_gone"
    if response.complete:
        return hand_over(response, exchange, on_data)
    exchange.start(response.status, response.headers)
    if response.error is not None:
        return "upstream_lost"
    sink = _Relay(response, exchange, on_data)
    response.connection.patience(first_data_s, stall_s)
    exchange.on_pause = response.connection.hold
    exchange.on_close(sink.client_gone)
    response.attach(sink)
    if exchange.paused:
        response.connection.hold(True)
    try:
        return await sink.outcome
    except BaseException:
        response.cancel()
        raise
    finally:
        exchange.on_pause = None
        response.sink = None  # which refers to the response


def hand_over(
    response: UpstreamResponse, exchange: Exchange, on_data: Callable[[bytes], None] | None = None
) -> Outcome:
    """`relay` of a response that is `complete`: nothing to wait for."""
    if exchange.closed:
        return "client_gone"
    exchange.start(response.status, response.headers)
    rest, response.rest = response.rest, b""
    exchange.end(rest)
    if on_data and rest:
        on_data(rest)
    return "complete"


class _Relay:
    """The sink of one relay."""

    __slots__ = ("outcome", "_response", "_exchange", "_on_data", "_events", "_whole", "_held")

    def __init__(self, response: UpstreamResponse, exchange: Exchange, on_data: Callable[[bytes], None] | None) -> None:
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._response = response
        self._exchange = exchange
        self._on_data = on_data
        content_type = response.header(b"content-type")
        self._events = (
            content_type is not None
            and content_type.startswith(b"text/event-stream")
            and response.header(b"content-encoding") is None
        )
        length = response.header(b"content-length")
        self._whole = length is not None and int(length) <= _WHOLE_BYTES
        self._held = b""

    def data(self, body: bytes, complete: bool) -> None:
        if self._held:
            body = self._held + body
            self._held = b""
        exchange = self._exchange
        if complete:
            exchange.end(body)
        elif self._whole:
            self._held = body
            return
        else:
            if self._events and not body.endswith(b"\n\n"):
                body = self._whole_events(body)
            if not body:
                return
            exchange.write(body)
        if self._on_data is not None and body:
            try:
                self._on_data(body)
            except Exception as error:
                self._response.cancel()
                if not self.outcome.done():
                    self.outcome.set_exception(error)
                return
        if complete:
            self._finish("complete")

    def lost(self, error: UpstreamError) -> None:
        self._finish("stalled" if error.kind == "timeout" else "upstream_lost")

    def client_gone(self) -> None:
        """Of the exchange."""
        self._response.cancel()
        self._finish("client_gone")

    def _whole_events(self, body: bytes) -> bytes:
        """`body` up to the last end of an event; the rest waits."""
        end = max(body.rfind(b"\n\n") + 2, body.rfind(b"\r\n\r\n") + 4)
        if end < 4:
            end = 0 if len(body) < _EVENT_BYTES else len(body)
        self._held = body[end:]
        return body[:end]

    def _finish(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
