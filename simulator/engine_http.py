"""The mock engine's HTTP/1.1: requests read with llhttp, answers written with the faults that were asked for."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

import httptools
import orjson

from deepinfer_simulator.engine_faults import Fault

Headers = list[tuple[bytes, bytes]]
MAX_BODY_BYTES = 1 << 30


class Ended(Exception):
    """The connection is gone, by the client or by a fault: nothing more is written."""


class Request:
    """One request, complete, and the answer to it."""

    def __init__(self, connection: Connection, method: bytes, target: bytes, headers: Headers) -> None:
        self.method = method.decode()
        self.path, _, self.query = target.decode().partition("?")
        self.headers = {name.lower().decode(): value.decode("latin-1") for name, value in headers}
        self.body = bytearray()
        self.keep_alive = True
        self.faults: dict[str, Fault] = {}
        self._connection = connection
        self._events = 0
        self._encoder: Any = None

    def json(self) -> Any:
        """The body. Raises ValueError."""
        return orjson.loads(self.body)

    async def answer(self, status: int, body: Any, headers: Headers | None = None) -> None:
        """A whole answer; JSON unless `body` is bytes. Raises Ended."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        kind = b"text/plain; charset=utf-8" if isinstance(body, bytes) else b"application/json"
        if "gzip" in self.faults:
            data = gzip.compress(data, 1)
        await self._head(status, [(b"content-type", kind), (b"content-length", b"%d" % len(data)), *(headers or [])])
        if fault := self.faults.get("reset_mid") or self.faults.get("fin_mid"):
            await self._send(data[: len(data) // 2])
            self._connection.end(reset=fault.kind == "reset_mid")
            raise Ended
        await self._send(data)
        self._finish()

    async def start_events(self) -> None:
        """The head of a stream of server-sent events. Raises Ended."""
        await self._head(
            200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"transfer-encoding", b"chunked")]
        )
        if "gzip" in self.faults:
            import zlib

            self._encoder = zlib.compressobj(1, zlib.DEFLATED, 31)

    async def events(self, data: bytes) -> None:
        """One write of one or more whole events. Raises Ended."""
        faults = self.faults
        if faults:
            for kind in ("reset_mid", "fin_mid", "stall_mid", "malformed_chunk"):
                if kind in faults and self._events >= faults[kind].after_events:
                    await self._break_off(kind)
        self._events += 1
        if self._encoder:
            import zlib

            data = self._encoder.compress(data) + self._encoder.flush(zlib.Z_SYNC_FLUSH)
        await self._send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_events(self) -> None:
        """The stream is complete. Raises Ended."""
        if self._encoder and (rest := self._encoder.flush()):
            await self._send(b"%x\r\n%b\r\n" % (len(rest), rest))
        await self._send(b"0\r\n\r\n")
        self._finish()

    async def before_head(self) -> None:
        """Faults that strike before anything is computed. Raises Ended."""
        if "reset_before" in self.faults:
            self._connection.end(reset=True)
            raise Ended
        if "stall_before" in self.faults:
            await asyncio.Event().wait()  # until the connection is lost

    async def _head(self, status: int, headers: Headers) -> None:
        faults = self.faults
        if "slow_head" in faults:
            await asyncio.sleep(faults["slow_head"].seconds)
        if "gzip" in faults:
            headers.append((b"content-encoding", b"gzip"))
        if "huge_headers" in faults:
            headers.append((b"x-padding", b"x" * faults["huge_headers"].size))
        if "close_each" in faults or not self.keep_alive:
            headers.append((b"connection", b"close"))
        if name := self.headers.get("x-request-id"):
            headers.append((b"x-request-id", name.encode("latin-1")))
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        await self._send(b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, HTTPStatus(status).phrase.encode(), lines))

    async def _break_off(self, kind: str) -> None:
        if kind == "stall_mid":
            await asyncio.Event().wait()  # until the connection is lost
        if kind == "malformed_chunk":
            await self._send(b"not a size\r\n")
        self._connection.end(reset=kind == "reset_mid")
        raise Ended

    async def _send(self, data: bytes) -> None:
        if "split" not in self.faults:
            await self._connection.write(data)
            return
        size = self.faults["split"].size
        for start in range(0, len(data), size):
            await self._connection.write(data[start : start + size])
            await asyncio.sleep(0)  # without Nagle, each write is a segment of its own

    def _finish(self) -> None:
        if "close_each" in self.faults or not self.keep_alive:
            self._connection.end(reset=False)


Answerer = Callable[[Request], Coroutine[Any, Any, None]]


class Connection(asyncio.Protocol):
    """One client: its requests are answered in their order; when it leaves, the answer under way is cancelled."""

    def __init__(self, answerer: Answerer, connections: set[Connection]) -> None:
        self._answerer = answerer
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: Any = None

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return self._task is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._waiting.clear()
        self._writable.set()
        if self._task:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self._transport.close()

    # What llhttp calls while it reads.

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers: Headers = []

    def on_url(self, piece: bytes) -> None:
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._request = Request(self, self._parser.get_method(), self._target, self._headers)
        self._request.keep_alive = self._parser.should_keep_alive()
        if self._request.headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        self._request.body += piece
        if len(self._request.body) > MAX_BODY_BYTES:
            self.end(reset=True)

    def on_message_complete(self) -> None:
        self._waiting.append(self._request)
        if self._task is None:
            self._next()

    def _next(self) -> None:
        request = self._waiting.popleft()
        self._task = asyncio.get_running_loop().create_task(self._answerer(request))
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, Ended):
            self.end(reset=True)
            raise error
        if self._waiting:
            self._next()

    async def write(self, data: bytes) -> None:
        """Write, and wait while the client does not read. Raises Ended when it is gone."""
        if self._transport.is_closing():
            raise Ended
        self._transport.write(data)
        if not self._writable.is_set():
            await self._writable.wait()

    def end(self, reset: bool) -> None:
        """Close: with a reset, or after what is written."""
        if not reset:
            self._transport.close()
            return
        with_reset = struct.pack("ii", 1, 0)
        import socket

        if (raw := self._transport.get_extra_info("socket")) is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, with_reset)
        self._transport.abort()
