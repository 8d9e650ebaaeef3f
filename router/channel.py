"""Messages between the supervisor and a worker over a socket pair: msgpack, each after its length."""

from socket import socket
from struct import Struct
from typing import Any

import msgpack

Message = dict[str, Any]
_LENGTH = Struct("!I")
READ_BYTES = 1 << 18


def pack(message: Message) -> bytes:
    """One frame."""
    body: bytes = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


def receive(channel: socket) -> Message:
    """Wait for one message, and read not a byte more. Raises EOFError: the other end has gone."""
    (size,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    message: Message = msgpack.unpackb(_exactly(channel, size))
    return message


def _exactly(channel: socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = channel.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


class Frames:
    """Puts messages together again from what a socket gave, in pieces of any size."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes."""
        self._buffer += data
        found = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            found.append(msgpack.unpackb(self._buffer[start + _LENGTH.size : end], strict_map_key=False))
            start = end
        del self._buffer[:start]
        return found
