"""Serves this node's snapshots, the cluster's directory of them, or both, over TCP."""

import hmac
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from threading import BoundedSemaphore, Event, Thread
from time import monotonic
from typing import Any

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.snapshot_directory import Holder, SnapshotDirectory
from deepinfer_kvstore.snapshot_wire import WireError, receive, send
from deepinfer_kvstore.snapshots import DIGEST_BYTES, SNAPSHOT_KEY_BYTES, SnapshotRing

MAX_KEYS = 1024
"""Of one question for holders."""


class SnapshotServer:
    """One thread accepts, one more per connection; a connection is one request.

    Who does not send the token in time gets no answer. Nothing that a peer sends stops the server.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        *,
        ring: SnapshotRing | None = None,
        directory: SnapshotDirectory | None = None,
        tls: ssl.SSLContext | None = None,
        insecure: bool = False,
        connections: int = 32,
        timeout_seconds: float = 5.0,
    ) -> None:
        """Listens at once; port 0 takes a free one. At most `connections` at a time, each for `timeout_seconds`.

        Raises:
            StoreConfigError: an empty token, no TLS without `insecure`, or an address that cannot be listened on.
        """
        if not token:
            raise StoreConfigError("snapshot server without a token: anyone could read states; give one")
        if tls is None and not insecure:
            raise StoreConfigError("snapshot server without TLS: give a certificate, or say insecure on a safe network")
        self._token = token.encode()
        self._ring = ring
        self._directory = directory
        self._tls = tls
        self._timeout_seconds = timeout_seconds
        self._free = BoundedSemaphore(connections)
        self._closing = Event()
        try:
            self._listener = socket.create_server(address, backlog=128)
        except OSError as error:
            raise StoreConfigError(f"snapshot server cannot listen on {address[0]}:{address[1]}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._thread = Thread(target=self._accept, name="snapshot-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or out of file descriptors for a moment
                if self._closing.wait(0.1):
                    return
                continue
            if self._free.acquire(blocking=False):
                Thread(target=self._serve, args=(connection,), name="snapshot-peer", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        deadline = monotonic() + self._timeout_seconds
        try:
            with connection:
                connection.settimeout(self._timeout_seconds)
                stream = connection if self._tls is None else self._tls.wrap_socket(connection, server_side=True)
                with stream:
                    request = receive(stream, deadline)
                    token = request.get("token")
                    if isinstance(token, str) and hmac.compare_digest(token.encode(), self._token):
                        reply, payload = self._answer(request)
                        send(stream, reply, deadline, payload)
        except OSError:
            pass  # a peer that went away, was too slow or spoke something else: it sees a closed connection
        finally:
            self._free.release()

    def _answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        answers: dict[object, Callable[[dict[str, Any]], tuple[dict[str, Any], bytes]]] = {}
        if self._ring is not None:
            answers["get"] = self._get
        if self._directory is not None:
            answers |= {"locate": self._locate, "announce": self._announce, "withdraw": self._withdraw}
        operation = request.get("op")
        if not isinstance(operation, str) or operation not in answers:
            raise WireError(f"operation {operation!r} is not served here")
        return answers[operation](request)

    def _get(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        assert self._ring is not None
        payload = self._ring.get(_key(request.get("key")))
        return ({"length": None}, b"") if payload is None else ({"length": len(payload)}, payload)

    def _locate(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        assert self._directory is not None
        keys = request.get("keys")
        if not isinstance(keys, list) or len(keys) > MAX_KEYS:
            raise WireError(f"keys are no list of at most {MAX_KEYS}")
        found = self._directory.locate([_key(key) for key in keys])
        return ({"position": None} if found is None else {"position": found[0], "holder": list(found[1])}), b""

    def _announce(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        assert self._directory is not None
        self._directory.announce(_key(request.get("key")), read_holder(request.get("holder")))
        return {}, b""

    def _withdraw(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        assert self._directory is not None
        address = request.get("address")
        if not isinstance(address, str):
            raise WireError("address is no text")
        self._directory.withdraw(_key(request.get("key")), address)
        return {}, b""


def _key(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) != SNAPSHOT_KEY_BYTES:
        raise WireError(f"key is not {SNAPSHOT_KEY_BYTES} bytes")
    return value


def read_holder(value: object) -> Holder:
    """A holder as msgpack brought it.

    Raises:
        WireError: anything else.
    """
    match value:
        case [str(address), int(length), bytes(digest), float(seconds)] if (
            len(address) <= 255 and 0 <= length < 1 << 32 and len(digest) == DIGEST_BYTES and 0 <= seconds < 1e9
        ):
            return Holder(address, length, digest, seconds)
    raise WireError("holder is not [address, length, digest, seconds]")
