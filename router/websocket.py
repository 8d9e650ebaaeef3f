"""Connections that change their protocol to WebSocket: from then on bytes go through unread, both ways.

Only from then on: until an engine has agreed to the change nothing that the client sends behind its request reaches it.
Such bytes could be another request, of which no key, limit or salt would have been asked.
"""

import asyncio
from asyncio import Future, Transport
from typing import cast

from deepinfer_router.exchange import Exchange
from deepinfer_router.http_client import Upstream, UpstreamError, UpstreamResponse
from deepinfer_router.http_headers import Headers
from deepinfer_router.http_request import END

_HEAD_BYTES = 64 << 10


async def change(
    exchange: Exchange, upstream: Upstream, headers: Headers, first_byte_s: float
) -> UpstreamResponse | None:
    """Ask `upstream` for the change of protocol that `exchange` asks for, and be the wire between them.

    None: it was made, and the first of both that closed has closed the other; or the client has gone. Otherwise what
    the engine answers instead, to be passed on like any answer. `headers`: the request's, with what the router adds.

    Raises:
        UpstreamError: no connection, or no answer within `first_byte_s`. Another answer may be given.
    """
    engine = _Engine(exchange, upstream)
    await upstream.open(lambda: engine)
    if exchange.closed:
        engine.transport.abort()
        return None
    engine.transport.write(upstream.head(exchange.method, exchange.path, headers, 0, upgrade=exchange.upgrade))
    exchange.on_close(engine.leave)
    try:
        async with asyncio.timeout(first_byte_s):
            await engine.decided
        response = await engine.answer if engine.answer is not None else None
        await engine.ended
    except TimeoutError:
        engine.leave()
        raise UpstreamError("timeout", True, f"{upstream.url} sent no answer within {first_byte_s:.1f} s") from None
    except asyncio.CancelledError:
        engine.leave()
        raise
    if engine.open:
        exchange.cut()
    return response


class _Engine(asyncio.Protocol):
    """The engine's end of the wire."""

    def __init__(self, exchange: Exchange, upstream: Upstream) -> None:
        self.transport: Transport
        self.open = False
        """The protocol has changed."""
        self.decided: Future[None] = upstream.loop.create_future()
        """Whether it changes; raises UpstreamError."""
        self.ended: Future[None] = upstream.loop.create_future()
        """There is no wire any more, or there will be none."""
        self.answer: Future[UpstreamResponse] | None = None
        """What the engine says instead."""
        self._exchange = exchange
        self._upstream = upstream
        self._said = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(Transport, transport)
        if self._exchange.closed:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.open:
            self._exchange.write_raw(data)
            return
        self._said += data
        while (end := self._said.find(END)) >= 0:
            status = self._said[len(b"HTTP/1.1 ") :][:4]
            if status == b"101 ":
                self._change()
            elif status.startswith(b"1"):
                self._said = self._said[end + len(END) :]  # 103 Early Hints: the answer is still to come
                continue
            else:
                self.answer = self._upstream.adopt(self.transport, self._said)
                self.ended.set_result(None)
            self._decide(None)
            return
        if len(self._said) > _HEAD_BYTES:
            self.transport.abort()
            self._decide(UpstreamError("protocol", True, f"{self._upstream.url} sent {_HEAD_BYTES} bytes of headers"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._decide(UpstreamError("reset", True, f"{self._upstream.url} closed the connection before it answered"))
        if not self.ended.done():
            self.ended.set_result(None)

    def pause_writing(self) -> None:
        self._exchange.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self._exchange.closed:
            self._exchange.transport.resume_reading()

    def send(self, data: bytes) -> None:
        """What the client sent."""
        if not self.ended.done():
            self.transport.write(data)

    def hold(self, held: bool) -> None:
        """The client takes less than the engine sends, or as much again."""
        if self.ended.done():
            return
        if held:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def leave(self) -> None:
        """The client has gone, or waits no longer."""
        self._decide(None)
        if self.answer is None or not self.answer.done():
            self.transport.abort()
        elif not self.answer.exception():
            self.answer.result().cancel()  # its connection is the pool's

    def _change(self) -> None:
        self.open = True
        said, self._said = self._said, b""
        self._exchange.on_pause = self.hold
        self._exchange.tunnel(said, self.send)

    def _decide(self, error: UpstreamError | None) -> None:
        if self.decided.done():
            return
        if error is None:
            self.decided.set_result(None)
        else:
            self.decided.set_exception(error)
