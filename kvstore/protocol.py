"""What CHECK's clients and server say to each other: frames of msgpack, each a length and a map, one answer a request.

A connection begins with `hello`, which tells versions apart and carries the token. Then, in any number:

    check       requests: [request, ...]        ->  replies: [reply, ...]
    namespaces                                  ->  namespaces: [{name, model, hash_tokens, none_hash}, ...]
    redeem      ticket                          ->  namespace, seconds, keys, entries
    release     ticket                          ->

An answer that is no success is {error: code, message}; so is a reply in a list of replies. Token ids and hashes travel
as bytes in a row: u32 little-endian, and 32 bytes each. Every length is bounded before it is read.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import msgpack

from deepinfer_kvstore.entry import PACKED_BYTES, Entry
from deepinfer_kvstore.extra_keys import ExtraKeys, Lora, MultiModal
from deepinfer_kvstore.keys import HASH_BYTES, KEY_BYTES, Key

VERSION = 1
LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 8 << 20
"""Of a request or an answer: two million tokens."""
MAX_HELLO_BYTES = 1 << 10
"""Of what is read from one who has not shown the token."""
MAX_REQUESTS = 256
"""In one `check`."""
MAX_ITEMS = 4096
"""Images and the like in one request."""
MAX_PARTS = 1 << 16
"""Of maps and lists and what they hold, in one frame: a byte of it may become a hundred of memory."""
MAX_TEXT_BYTES = 4096
"""Of a name, a path, a salt or an identifier."""
TICKET_BYTES = 16

Message = dict[str, Any]


class Code(StrEnum):
    """Why there is no answer."""

    MALFORMED = "malformed"
    VERSION = "version"
    TOKEN = "token"
    NAMESPACE = "namespace"
    """None of that name here, or several of that model."""
    RESEND = "resend"
    """The chain to go on from is not kept (any more): send it whole."""
    LIMITED = "limited"
    """More requests than the rate allows."""
    BUSY = "busy"
    TICKET = "ticket"
    """Unknown, or over."""


class ProtocolError(Exception):
    """A request that is not answered. The peer is told."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code

    def message(self) -> Message:
        """As it travels."""
        return {"error": str(self.code), "message": str(self)}


@dataclass(frozen=True)
class CheckRequest:
    """One question: how much of this prompt is stored?"""

    namespace: str
    """Name of its directory, or of its model where that has one only."""
    tokens: bytes | None = None
    hashes: bytes | None = None
    """In the place of tokens. Of tokens and hashes, one is given."""
    length: int | None = None
    """Tokens of the whole prompt; with hashes alone, as many as these cover."""
    after: bytes = b""
    """Last hash of a chain that the server keeps: tokens or hashes go on from there. Empty: from the start."""
    keep: bool = False
    """Keep the chain for the next turn."""
    ticket_seconds: float = 0.0
    """Hold what is found for so long, and give a ticket; 0 for none."""
    tenant: str = ""
    """For the metrics. What keeps tenants apart is the salt."""
    extra: ExtraKeys = field(default_factory=ExtraKeys)

    def message(self) -> Message:
        """As it travels: what has its default stays out."""
        extra = self.extra
        if extra.embeds is not None:
            raise ValueError("prompts with embeddings have no tokens to hash here: ask by hashes")
        values = {
            "namespace": self.namespace,
            "tokens": self.tokens,
            "hashes": self.hashes,
            "length": self.length,
            "after": self.after,
            "keep": self.keep,
            "ticket_seconds": self.ticket_seconds,
            "tenant": self.tenant,
            "salt": extra.salt,
            "lora": extra.lora and list(extra.lora),
            "mm": [list(item) for item in extra.mm],
        }
        return {name: value for name, value in values.items() if value or (name in _ALWAYS and value is not None)}


_ALWAYS = ("namespace", "tokens", "hashes")
_FIELDS = {*_ALWAYS, "length", "after", "keep", "ticket_seconds", "tenant", "salt", "lora", "mm"}


@dataclass(frozen=True)
class CheckReply:
    """The answer."""

    hit_tokens: int
    """Leading tokens that an engine will load: see `hit.hit_tokens`. A multiple of the hash unit."""
    load_bytes: int
    """Payload that it loads for them."""
    tier: str
    """Where they are: `store`, or `none`."""
    ticket: bytes = b""
    tail: bytes = b""
    """Of a chain that was to be kept: its last hash, for `after`."""

    def message(self) -> Message:
        """As it travels."""
        message: Message = {"hit_tokens": self.hit_tokens, "bytes": self.load_bytes, "tier": self.tier}
        for name, value in (("ticket", self.ticket), ("tail", self.tail)):
            if value:
                message[name] = value
        return message


class Held(NamedTuple):
    """What a ticket tells."""

    namespace: str
    seconds: float
    """For which it still holds."""
    blocks: list[tuple[Key, Entry]]
    """Those that are still there."""

    def message(self) -> Message:
        """As it travels."""
        return {
            "namespace": self.namespace,
            "seconds": self.seconds,
            "keys": b"".join(key for key, _ in self.blocks),
            "entries": b"".join(entry.pack() for _, entry in self.blocks),
        }


def pack(message: Mapping[str, Any]) -> bytes:
    """The frame of a message."""
    body: bytes = msgpack.packb(message)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes | bytearray | memoryview) -> Message:
    """The message of a frame whose length has been read.

    Raises:
        ProtocolError: anything but a map of text to bounded values.
    """
    left = MAX_PARTS

    def count(part: Any) -> Any:
        nonlocal left
        left -= 1 + len(part)
        if left < 0:
            raise ValueError(f"more than {MAX_PARTS} parts")
        return part

    try:
        message = msgpack.unpackb(
            body, max_map_len=64, max_array_len=MAX_ITEMS, max_str_len=MAX_TEXT_BYTES, max_ext_len=0,
            object_hook=count, list_hook=count,
        )  # fmt: skip
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(Code.MALFORMED, f"no frame of msgpack: {type(error).__name__}: {error}"[:200]) from error
    if not isinstance(message, dict) or not all(isinstance(name, str) for name in message):
        raise ProtocolError(Code.MALFORMED, "a frame is a map with names")
    return message


def read_request(message: object) -> CheckRequest:
    """A request as it came.

    Raises:
        ProtocolError: which field, and what it must be.
    """
    if not isinstance(message, dict) or not message.keys() <= _FIELDS:
        raise _malformed("a request", f"a map of {', '.join(sorted(_FIELDS))}")
    tokens, hashes = _bytes(message, "tokens", 4), _bytes(message, "hashes", HASH_BYTES)
    if (tokens is None) == (hashes is None):
        raise _malformed("a request", "one with either tokens or hashes")
    length = message.get("length")
    if length is not None and not (_is_int(length) and 0 <= length < 1 << 32):
        raise _malformed("length", "a number of tokens")
    after = _bytes(message, "after", HASH_BYTES) or b""
    if len(after) > HASH_BYTES:
        raise _malformed("after", "one hash")
    keep, seconds = message.get("keep", False), message.get("ticket_seconds", 0)
    if not isinstance(keep, bool):
        raise _malformed("keep", "true or false")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds <= 3600:
        raise _malformed("ticket_seconds", "0 to 3600")
    return CheckRequest(
        _text(message, "namespace"),
        tokens,
        hashes,
        length,
        after,
        keep,
        float(seconds),
        _text(message, "tenant", ""),
        ExtraKeys(_text(message, "salt", "") or None, _lora(message.get("lora")), _mm(message.get("mm", []))),
    )


def read_reply(message: object) -> CheckReply:
    """A reply as it came.

    Raises:
        ProtocolError: it says no, or is no reply.
    """
    match message:
        case {"hit_tokens": int(hit), "bytes": int(size), "tier": str(tier), **more} if hit >= 0 and size >= 0:
            ticket, tail = more.get("ticket", b""), more.get("tail", b"")
            if isinstance(ticket, bytes) and isinstance(tail, bytes):
                return CheckReply(hit, size, tier, ticket, tail)
    raise _refusal(message) or _malformed("a reply", "a map of hit_tokens, bytes, tier, ticket, tail")


def read_held(message: Message) -> Held:
    """What a ticket tells, as it came.

    Raises:
        ProtocolError: the server says no, or it is something else.
    """
    match message:
        case {
            "namespace": str(namespace),
            "seconds": float(seconds),
            "keys": bytes(keys),
            "entries": bytes(entries),
        } if len(keys) % KEY_BYTES == 0 and len(entries) == len(keys) // KEY_BYTES * PACKED_BYTES:
            places = [Entry.unpack(entry) for entry in split(entries, PACKED_BYTES)]
            return Held(namespace, seconds, list(zip(split(keys, KEY_BYTES), places, strict=True)))
    raise _refusal(message) or _malformed("an answer", "a map of namespace, seconds, keys, entries")


def split(row: bytes, size: int) -> list[bytes]:
    """Pieces of `size` bytes that lie in a row."""
    return [row[at : at + size] for at in range(0, len(row), size)]


def _refusal(message: object) -> ProtocolError | None:
    if not isinstance(message, dict) or "error" not in message:
        return None
    code = message["error"]
    known = Code(code) if isinstance(code, str) and code in Code._value2member_map_ else Code.MALFORMED
    return ProtocolError(known, str(message.get("message", ""))[:200])


def _malformed(what: str, wanted: str) -> ProtocolError:
    return ProtocolError(Code.MALFORMED, f"{what} must be {wanted}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bytes(message: Message, name: str, unit: int) -> bytes | None:
    value = message.get(name)
    if value is not None and not (isinstance(value, bytes) and len(value) % unit == 0):
        raise _malformed(name, f"bytes, {unit} for each")
    return value


def _text(message: Message, name: str, default: str | None = None) -> str:
    value = message.get(name, default)
    if not isinstance(value, str):
        raise _malformed(name, "text")
    return value


def _lora(value: object) -> Lora | None:
    match value:
        case None:
            return None
        case [str(name), str(path)]:
            return Lora(name, path)
    raise _malformed("lora", "[name, path]")


def _mm(value: object) -> list[MultiModal]:
    if not isinstance(value, list):
        raise _malformed("mm", "a list")
    items = []
    for item in value:
        match item:
            case [str(identifier), offset, length] if (
                _is_int(offset) and _is_int(length) and 0 <= offset < 1 << 32 and 0 <= length < 1 << 32
            ):
                items.append(MultiModal(identifier, offset, length))
            case _:
                raise _malformed("mm", "a list of [identifier, offset, length]")
    if any(before.offset > after.offset for before, after in zip(items, items[1:], strict=False)):
        raise _malformed("mm", "in order of offset")
    return items
