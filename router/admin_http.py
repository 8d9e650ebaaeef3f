"""The HTTP/1.1 server of the admin port: a thread a connection, a handful of connections, small requests.

Threads, so that it answers whatever else its process does; httptools reads, as on the data path.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from threading import BoundedSemaphore, Lock, Thread
from time import monotonic
from typing import NamedTuple

import httptools

MAX_CONNECTIONS = 32
"""More: the one whose request has been waited for longest is closed, so that a crowd keeps no probe out."""
ROOM_S = 1.0
"""How long that may take."""
MAX_REQUEST_BYTES = 16 << 10
PATIENCE_S = 10.0
"""For a request to arrive, an answer to be taken, or the next request."""
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"}


class AdminRequest(NamedTuple):
    """What was asked."""

    method: str
    path: str
    """Without the query."""
    headers: dict[str, str]
    """Lower-case names."""
    body: bytes
    peer: str
    """Address of the client."""


class AdminAnswer(NamedTuple):
    """What is answered."""

    status: int
    content_type: str
    body: bytes


class AdminServer:
    """Answers on one port until `close`, whatever `answer` does."""

    def __init__(self, host: str, port: int, answer: Callable[[AdminRequest], AdminAnswer]) -> None:
        """Listens at once. Raises OSError."""
        self._answer = answer
        self._free = BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = Lock()
        self._idle: dict[socket.socket, None] = {}
        """Without a whole request, in the order since when."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.port: int = self._listener.getsockname()[1]

    def start(self) -> None:
        """Begin to answer."""
        Thread(target=self._accept, name="admin", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self._free.acquire(blocking=False):
                self._make_room()
                if not self._free.acquire(timeout=ROOM_S):
                    client.close()
                    continue
            Thread(target=self._serve, args=(client,), name="admin-client", daemon=True).start()

    def _make_room(self) -> None:
        with self._lock:
            oldest = next(iter(self._idle), None)
            if oldest is not None:
                del self._idle[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def _wait_for(self, client: socket.socket, waited: bool) -> None:
        with self._lock:
            if waited:
                self._idle[client] = None
            else:
                self._idle.pop(client, None)

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                client.settimeout(PATIENCE_S)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while self._one(client):
                    pass
        except OSError:
            pass  # it left, or was too slow
        finally:
            self._free.release()

    def _one(self, client: socket.socket) -> bool:
        """Answer one request; whether another may follow."""
        reader = _Reader()
        parser = httptools.HttpRequestParser(reader)
        received = 0
        deadline = monotonic() + PATIENCE_S
        keep = True
        self._wait_for(client, True)
        try:
            while not reader.complete:
                data = client.recv(MAX_REQUEST_BYTES)
                received += len(data)
                if not data or received > MAX_REQUEST_BYTES or monotonic() > deadline:
                    return False
                parser.feed_data(data)
        except (httptools.HttpParserError, UnicodeDecodeError):
            client.sendall(_bytes(AdminAnswer(400, "text/plain", b"not HTTP/1.1\n"), keep=False))
            return False
        except httptools.HttpParserUpgrade:  # behind the head: it is answered as if it had not asked for that
            keep = False
        finally:
            self._wait_for(client, False)
        if reader.followed:
            client.sendall(_bytes(AdminAnswer(400, "text/plain", b"one request at a time\n"), keep=False))
            return False
        path = reader.url.partition(b"?")[0].decode("latin-1")
        method = parser.get_method().decode()
        peer = client.getpeername()[0]
        answer = self._answer(AdminRequest(method, path, reader.headers, bytes(reader.body), peer))
        keep = keep and bool(parser.should_keep_alive())
        client.sendall(_bytes(answer, keep, silent=method == "HEAD"))
        return keep


class _Reader:
    """httptools' callbacks."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.complete = False
        self.followed = False
        """Another request came before this one was answered."""

    def on_message_begin(self) -> None:
        self.followed = self.complete

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower().decode("latin-1")] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


def _bytes(answer: AdminAnswer, keep: bool, silent: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Service Unavailable')}\r\n"
        f"content-type: {answer.content_type}\r\ncontent-length: {len(answer.body)}\r\n"
        f"cache-control: no-store\r\nx-content-type-options: nosniff\r\n"
        f"connection: {'keep-alive' if keep else 'close'}\r\n\r\n"
    )
    return head.encode() + (b"" if silent else answer.body)
