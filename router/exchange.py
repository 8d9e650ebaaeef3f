"""One request of a client and its answer."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from deepinfer_router.http_headers import ALONE, HOP_BY_HOP, STATUS_LINES, Headers, end_to_end, find, status_line
from deepinfer_router.outgoing import Outgoing


class Connection(Protocol):
    """What an exchange needs of the connection that it came over."""

    def answered(self, reusable: bool) -> None:
        """The answer is complete. Not `reusable`: the connection ends with it."""

    def take_ahead(self) -> bytes:
        """What has come behind the request, and read on."""


class Exchange:
    """Given to the handler when the body is complete. For the event loop's thread.

    Answer with `respond`, or with `start`, `write`… and `end`. Nothing is sent before the first `write`, `end` or
    `respond`, so until then (`started`) another answer may be given instead. Once the client has gone (`closed`) all of
    them do nothing.
    """

    __slots__ = (
        "method",
        "path",
        "route",
        "headers",
        "body",
        "received_at",
        "peer",
        "upgrade",
        "closed",
        "started",
        "status",
        "ended",
        "paused",
        "on_pause",
        "raw",
        "task",
        "transport",
        "_connection",
        "_http_1_0",
        "_keep_alive",
        "_head",
        "_chunked",
        "_silent",
        "_missing",
        "_on_close",
        "_resumed",
    )

    def __init__(
        self,
        connection: Connection,
        transport: Outgoing,
        method: bytes,
        path: bytes,
        headers: Headers,
        body: bytes,
        *,
        received_at: float,
        peer: str,
        http_1_0: bool = False,
        keep_alive: bool = True,
        upgrade: bytes | None = None,
    ) -> None:
        self.method = method
        self.path = path
        """Raw, with its query."""
        self.route = path.partition(b"?")[0]
        """The path without its query."""
        self.headers = headers
        """Lower-case names, in the order of arrival."""
        self.body = body
        self.received_at = received_at
        """When its head was complete, on the event loop's clock."""
        self.peer = peer
        """Address, without a port; empty over a unix socket."""
        self.upgrade = upgrade
        """b"websocket": what the client asks to change to."""
        self.closed = False
        """The client has gone, or the connection was aborted."""
        self.status = 0
        """Of the answer; 0: none has been begun."""
        self.started = False
        """Bytes of the answer have been sent."""
        self.ended = False
        """The answer is complete."""
        self.paused = False
        """The client takes bytes slower than they are written: wait for `drain`."""
        self.on_pause: Callable[[bool], None] | None = None
        """Told when `paused` changes."""
        self.raw: Callable[[bytes], None] | None = None
        """Takes what comes behind the request: the connection is no longer HTTP."""
        self.task: asyncio.Task[None]
        """That answers it."""
        self.transport = transport
        self._connection = connection
        self._http_1_0 = http_1_0
        self._keep_alive = keep_alive
        self._head: bytes | None = None
        self._chunked = False
        self._silent: bool  # of the head, as the next one
        self._missing: int | None
        self._on_close: list[Callable[[], object]] = []
        self._resumed: asyncio.Future[None] | None = None

    def header(self, name: bytes) -> bytes | None:
        """First value of the lower-case `name`."""
        return find(self.headers, name)

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call it as soon as the client has gone; at once if it has. Not called once the answer is complete."""
        if self.closed:
            callback()
        else:
            self._on_close.append(callback)

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole answer. `headers` carry no content-length."""
        self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.end(body)

    def start(self, status: int, headers: Headers) -> None:
        """The head of an answer, sent with the first `write`. With a content-length the body must have it; else it is
        sent in chunks, or to HTTP/1.0 until the connection ends. What concerns one connection is left out of `headers`.

        Raises:
            RuntimeError: an answer is under way.
        """
        if self.started or self.ended:
            raise RuntimeError(f"status {status} after an answer was begun")
        self.status = status
        lines = [STATUS_LINES.get(status) or status_line(status)]
        length = None
        for header in headers:
            name = header[0]
            if name in HOP_BY_HOP:
                if name == b"connection" and header[1] not in ALONE:
                    self.start(status, end_to_end(headers))
                    return
                continue
            lines.append(b": ".join(header))
            if name == b"content-length":
                length = header[1]
        self._silent = self.method == b"HEAD" or status in (204, 304) or status < 200
        self._missing = None
        self._chunked = False
        if self._silent:
            pass
        elif length is not None:
            self._missing = int(length)
        elif self._http_1_0:
            self._keep_alive = False
        else:
            self._chunked = True
        if self._chunked:
            lines.append(b"transfer-encoding: chunked")
        if not self._keep_alive:
            lines.append(b"connection: close")
        elif self._http_1_0:
            lines.append(b"connection: keep-alive")
        lines.append(b"\r\n")
        self._head = b"\r\n".join(lines)

    def write(self, data: bytes) -> None:
        """A piece of the body."""
        if self.closed or self.ended or not data:
            return
        size = len(data)
        if self._chunked and self.started and size < _JOINED_BYTES:  # as good as always
            self.transport.write_at_once(b"%x\r\n%b\r\n" % (size, data))
        else:
            self._send(data, b"", self.transport.write_at_once)

    def end(self, data: bytes = b"") -> None:
        """The last piece, if any, and the end. A body shorter than its content-length ends the connection."""
        if self.closed or self.ended:
            return
        self._send(data, b"0\r\n\r\n" if self._chunked else b"", self.transport.write)
        self.ended = True
        self._on_close.clear()
        self.on_pause = None
        self._connection.answered(self._keep_alive and not self._missing)

    def abort(self) -> None:
        """End the connection at once, so that the client sees an answer that is not complete."""
        self.closed = True
        self.transport.abort()

    def cut(self) -> None:
        """End the connection once what was written is sent, without the body's end: the client sees that it is not
        whole."""
        if self.closed or self.ended:
            return
        self.ended = True
        self._on_close.clear()
        self.on_pause = None
        self._connection.answered(False)

    def close_after(self) -> None:
        """Let this be the last answer of its connection, if its head is not yet sent."""
        self._keep_alive = False

    def tunnel(self, head: bytes, receive: Callable[[bytes], None]) -> None:
        """Write `head`, which changes the protocol. From now on `receive` gets what the client sends, and `write_raw`
        writes what it reads."""
        self._keep_alive = False
        self.status = 101
        self.write_raw(head)
        self.raw = receive
        ahead = self._connection.take_ahead()
        if ahead:
            receive(ahead)

    def write_raw(self, data: bytes) -> None:
        """Bytes as they are."""
        if not self.closed:
            self.started = True
            self.transport.write_at_once(data)

    async def drain(self) -> None:
        """Wait until the client has taken enough, or has gone."""
        while self.paused and not self.closed:
            if self._resumed is None:
                self._resumed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._resumed)  # others may wait for it too

    def _send(self, data: bytes, tail: bytes, write: Callable[[bytes], None]) -> None:
        head = self._head
        if head is None:
            raise RuntimeError("a body before its head")
        if self._silent:
            data = b""
        elif self._missing is not None:
            data = data[: self._missing]
            self._missing -= len(data)
        size = len(data)
        if self._chunked and size:
            head_of_chunk, tail = b"%x\r\n" % size, b"\r\n" + tail
        else:
            head_of_chunk = b""
        if self.started:
            head = b""
        self.started = True
        if size < _JOINED_BYTES:
            whole = b"%b%b%b%b" % (head, head_of_chunk, data, tail)
            if whole:
                write(whole)
        else:
            self.transport.writelines((head + head_of_chunk, data, tail))

    # the connection's

    def pause(self, paused: bool) -> None:
        """The client's transport is full, or no longer."""
        self.paused = paused
        if self.on_pause:
            self.on_pause(paused)
        if not paused and self._resumed:
            self._resumed.set_result(None)
            self._resumed = None

    def client_gone(self) -> list[Callable[[], object]]:
        """Mark it closed; what has to be called now."""
        self.closed = True
        if self._resumed:
            self._resumed.set_result(None)
            self._resumed = None
        callbacks, self._on_close = self._on_close, []
        return callbacks


_JOINED_BYTES = 16 << 10
"""Larger pieces are not copied: another buffer of the same system call costs less."""

Handler = Callable[[Exchange], Coroutine[Any, Any, None]]
"""Answers an exchange; runs as one task a request."""
