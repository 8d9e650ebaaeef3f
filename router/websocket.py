"""Connections that change their protocol (WebSocket): from then on bytes go through unread, both ways."""

import asyncio
from asyncio import Transport
from typing import Literal, cast

from deepinfer_router.exchange import Exchange
from deepinfer_router.http_client import Upstream, UpstreamError
from deepinfer_router.http_headers import Headers


async def tunnel(exchange: Exchange, upstream: Upstream, headers: Headers) -> Literal["complete", "client_gone"]:
    """Ask `upstream` for the change of protocol that `exchange` asks for, and be the wire between them.

    What the engine answers is passed on as it is, a refusal too; the first of both that closes closes the other.
    `headers`: the request's, with what the router adds.

    Raises:
        UpstreamError: no connection, or it ended before the engine answered. Another answer may be given.
    """
    engine = _Engine(exchange)
    await upstream.open(lambda: engine)
    if exchange.closed:
        engine.transport.abort()
        return "client_gone"
    head = upstream.head(exchange.method, exchange.path, headers, len(exchange.body), upgrade=exchange.upgrade)
    engine.transport.write(head + exchange.body)
    exchange.on_pause = engine.hold
    exchange.on_close(engine.client_gone)
    exchange.tunnel(engine.send)
    try:
        await engine.ended
    except asyncio.CancelledError:
        engine.transport.abort()
        raise
    if exchange.closed:
        return "client_gone"
    if not exchange.started:
        raise UpstreamError("reset", True, f"{upstream.url} closed the connection before it answered")
    exchange.cut()
    return "complete"


class _Engine(asyncio.Protocol):
    """The engine's end of the wire."""

    def __init__(self, exchange: Exchange) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: Transport
        self._exchange = exchange

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(Transport, transport)
        if self._exchange.closed:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._exchange.write_raw(data)

    def connection_lost(self, exc: Exception | None) -> None:
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

    def client_gone(self) -> None:
        """The exchange's."""
        self.transport.abort()
        if not self.ended.done():
            self.ended.set_result(None)
