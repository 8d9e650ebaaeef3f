"""Frames between snapshot servers and those that ask them: a length, then msgpack; of a payload, its bare bytes.

Every length is bounded before it is read, and every call has one deadline for all of its bytes, so that a peer that
sends too much, too little or too slowly costs a bounded time and no memory.
"""

import socket
import struct
from collections.abc import Mapping
from time import monotonic
from typing import Any

import msgpack

MAX_FRAME_BYTES = 1 << 17
"""Of a request or a reply without its payload: a thousand keys."""
MAX_PAYLOAD_BYTES = 1 << 30

_LENGTH = struct.Struct(">I")


class WireError(OSError):
    """A peer that does not keep to the protocol."""


def remaining(deadline: float) -> float:
    """Seconds left.

    Raises:
        TimeoutError: none.
    """
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError("the peer's time is over")
    return left


def receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytearray:
    """`size` bytes, from what the caller has bounded.

    Raises:
        OSError: the connection ended or the deadline passed before.
    """
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        connection.settimeout(remaining(deadline))
        count = connection.recv_into(view[got:])
        if not count:
            raise WireError(f"connection closed after {got} of {size} bytes")
        got += count
    return buffer


def receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """One frame: a map with text keys.

    Raises:
        OSError: the connection ended, the deadline passed, or what came is no frame.
    """
    (size,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, deadline))
    if size > MAX_FRAME_BYTES:
        raise WireError(f"frame of {size} bytes, at most {MAX_FRAME_BYTES} are read")
    body = receive_exactly(connection, size, deadline)
    try:
        message = msgpack.unpackb(body)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"frame is not msgpack: {error}") from error
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise WireError("frame is not a map with text keys")
    return message


def send(
    connection: socket.socket, message: Mapping[str, Any], deadline: float, payload: bytes | memoryview = b""
) -> None:
    """One frame, and after it `payload`, whose length the frame must tell.

    Raises:
        OSError: the connection ended or the deadline passed.
    """
    body = msgpack.packb(dict(message))
    for piece in (_LENGTH.pack(len(body)) + body, payload):
        view = memoryview(piece)
        while view:
            connection.settimeout(remaining(deadline))
            view = view[connection.send(view) :]
