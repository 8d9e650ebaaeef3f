"""Asks other nodes for snapshots. Whatever goes wrong is "no snapshot"."""

import socket
import ssl
from collections import Counter
from collections.abc import Sequence
from threading import Lock
from time import monotonic
from typing import Any

from deepinfer_kvstore.snapshot_directory import Holder
from deepinfer_kvstore.snapshot_server import MAX_KEYS, read_holder
from deepinfer_kvstore.snapshot_wire import MAX_PAYLOAD_BYTES, WireError, receive, receive_exactly, remaining, send
from deepinfer_kvstore.snapshots import digest_of

CALL_SECONDS = 0.5
"""Longest call to another node."""


class SnapshotPeers:
    """Calls that block for at most `timeout_seconds`, each on a connection of its own. Thread-safe."""

    def __init__(
        self,
        token: str,
        *,
        tls: ssl.SSLContext | None = None,
        secret: bytes | None = None,
        timeout_seconds: float = CALL_SECONDS,
    ) -> None:
        """`tls`: None for a trusted network. `secret`: of `snapshots.digest_of`, the same on every node."""
        self._token = token
        self._tls = tls
        self._secret = secret
        self._timeout_seconds = timeout_seconds
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def fetch(self, key: bytes, holder: Holder, payload_bytes: int) -> bytes | None:
        """The snapshot `key`, if `holder` sends the `payload_bytes` bytes that were announced; None otherwise."""
        how, payload = self._fetch(key, holder, payload_bytes)
        self._count(how)
        return payload

    def _fetch(self, key: bytes, holder: Holder, payload_bytes: int) -> tuple[str, bytes | None]:
        if holder.length != payload_bytes or payload_bytes > MAX_PAYLOAD_BYTES:
            return "wrong_length", None
        deadline = monotonic() + self._timeout_seconds
        try:
            with self._connect(holder.address, deadline) as stream:
                length = self._ask(stream, {"op": "get", "key": key}, deadline).get("length")
                if length != payload_bytes:
                    return "absent" if length is None else "wrong_length", None
                payload = bytes(receive_exactly(stream, payload_bytes, deadline))
        except (OSError, ValueError):
            return "unreachable", None
        if digest_of(key, payload, self._secret) != holder.digest:
            return "corrupt", None
        return "fetched", payload

    def locate(self, directory: str, keys: Sequence[bytes]) -> tuple[int, Holder] | None:
        """(position in `keys`, holder) of the first of at most 1024 keys that the directory at `host:port` knows."""
        asked = list(keys[:MAX_KEYS])
        reply = self._call(directory, {"op": "locate", "keys": asked})
        position = None if reply is None else reply.get("position")
        if not isinstance(position, int) or not 0 <= position < len(asked):
            return None
        try:
            return position, read_holder(reply.get("holder") if reply else None)
        except WireError:
            return None

    def announce(self, directory: str, key: bytes, holder: Holder) -> bool:
        """Tell the directory that `holder` has `key`; whether it knows now."""
        return self._call(directory, {"op": "announce", "key": key, "holder": list(holder)}) is not None

    def withdraw(self, directory: str, key: bytes, address: str) -> bool:
        """Tell the directory that `address` does not have `key`; whether it knows now."""
        return self._call(directory, {"op": "withdraw", "key": key, "address": address}) is not None

    def counts(self) -> Counter[str]:
        """Fetches by how they ended (fetched, absent, wrong_length, corrupt, unreachable), and directory_failed."""
        with self._lock:
            return self._counts.copy()

    def _call(self, address: str, request: dict[str, Any]) -> dict[str, Any] | None:
        deadline = monotonic() + self._timeout_seconds
        try:
            with self._connect(address, deadline) as stream:
                return self._ask(stream, request, deadline)
        except (OSError, ValueError):
            self._count("directory_failed")
            return None

    def _connect(self, address: str, deadline: float) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), remaining(deadline))
        if self._tls is None:
            return connection
        try:
            connection.settimeout(remaining(deadline))
            return self._tls.wrap_socket(connection, server_hostname=host.strip("[]"))
        except BaseException:
            connection.close()
            raise

    def _ask(self, stream: socket.socket, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        send(stream, {"token": self._token, **request}, deadline)
        return receive(stream, deadline)

    def _count(self, how: str) -> None:
        with self._lock:
            self._counts[how] += 1
