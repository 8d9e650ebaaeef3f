"""The header at the end of each slot, and the check that a slot holds what the index says.

A torn write, a reused slot, another model's bytes and a flipped bit all end as a reason to miss, never as a hit.
"""

import struct
from enum import StrEnum
from hmac import compare_digest
from typing import NamedTuple
from zlib import crc32

from blake3 import blake3
from xxhash import xxh3_128_digest

from deepinfer_kvstore.descriptor import FORMAT_VERSION
from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import HEADER_BYTES
from deepinfer_kvstore.keys import Key

MAGIC = b"DIKVSLOT"
SECRET_BYTES = 32
_PREFIX = struct.Struct("<8sI32s")
_IDENTITY = struct.Struct(_PREFIX.format + "34sQI16s")  # what a hit has to match
_FIELDS = struct.Struct(_IDENTITY.format + "8sIQBI")  # without MAC and CRC
_MAC = struct.Struct("<32s")
_CRC = struct.Struct("<I")
_MAC_AT = _FIELDS.size
_CRC_AT = _MAC_AT + _MAC.size
PACKED_BYTES = _CRC_AT + _CRC.size
assert PACKED_BYTES <= HEADER_BYTES


class Flaw(StrEnum):
    """Why a slot is not the block asked for."""

    HEADER = "header"
    """No header, a torn one, or one of another format version."""
    NAMESPACE = "namespace"
    """Written by another model, revision, dtype or layout."""
    GENERATION = "generation"
    """The slot holds another block by now, or does not yet hold this one."""
    CHECKSUM = "checksum"
    MAC = "mac"
    """Whoever wrote it does not know the secret."""


class SlotHeader(NamedTuple):
    """What a slot says of itself, enough to rebuild the index from slabs."""

    key: Key
    generation: int
    length: int
    checksum: bytes
    """xxh3-128 of the payload, 16 bytes."""
    parent: bytes
    depth: int
    created_ms: int
    ttl_class: int
    tenant: int


class Seal:
    """Writes and checks headers of one namespace. Thread-safe."""

    def __init__(self, namespace: bytes, secret: bytes | None = None) -> None:
        """`namespace` is the descriptor's digest; `secret`, 32 bytes, adds a keyed BLAKE3 of header and payload.

        Raises:
            StoreConfigError: a secret of another length.
        """
        if secret is not None and len(secret) != SECRET_BYTES:
            raise StoreConfigError(f"secret has {len(secret)} bytes, it must have {SECRET_BYTES}")
        self._namespace = namespace
        self._secret = secret or b""
        self.prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, namespace)
        """How each header begins. Key, generation, length and checksum follow."""

    @property
    def is_plain(self) -> bool:
        """Whether there is no MAC to check."""
        return not self._secret

    def write(self, header: memoryview, key: Key, entry: Entry, payload: memoryview) -> None:
        """Write the header of `payload` into `header`, `HEADER_BYTES` long."""
        _FIELDS.pack_into(
            header, 0, MAGIC, FORMAT_VERSION, self._namespace, key, entry.location.generation, entry.length,
            xxh3_128_digest(payload), entry.parent, entry.depth, entry.created_ms, entry.ttl_class, entry.tenant,
        )  # fmt: skip
        header[_MAC_AT:] = bytes(HEADER_BYTES - _MAC_AT)
        if self._secret:
            header[_MAC_AT:_CRC_AT] = self._mac(header, payload)
        _CRC.pack_into(header, _CRC_AT, crc32(header[:_CRC_AT]))

    def parse(self, header: memoryview) -> SlotHeader | Flaw:
        """The header alone, its payload not looked at: for rebuilding an index."""
        magic, version, namespace, *fields = _FIELDS.unpack_from(header)
        if (
            magic != MAGIC
            or version != FORMAT_VERSION
            or crc32(header[:_CRC_AT]) != _CRC.unpack_from(header, _CRC_AT)[0]
        ):
            return Flaw.HEADER
        if namespace != self._namespace:
            return Flaw.NAMESPACE
        return SlotHeader(*fields)

    def flaw(self, header: memoryview, payload: memoryview, key: Key, generation: int) -> Flaw | None:
        """Why `payload` is not block `key` of `generation`; None when it is."""
        found = self.parse(header)
        if isinstance(found, Flaw):
            return found
        if found.generation != generation or found.key != key or found.length != len(payload):
            return Flaw.GENERATION
        if xxh3_128_digest(payload) != found.checksum:
            return Flaw.CHECKSUM
        if self._secret and not compare_digest(self._mac(header, payload), header[_MAC_AT:_CRC_AT]):
            return Flaw.MAC
        return None

    def is_whole(self, slots: memoryview, at: int, payload: memoryview, key: Key, generation: int) -> bool:
        """Whether `flaw` would find none in the header at offset `at` of `slots`; faster, for fields that a hit does
        not need are not looked at."""
        found = _IDENTITY.unpack_from(slots, at)
        if found != (MAGIC, FORMAT_VERSION, self._namespace, key, generation, len(payload), xxh3_128_digest(payload)):
            return False
        return not self._secret or self.flaw(slots[at : at + HEADER_BYTES], payload, key, generation) is None

    def _mac(self, header: memoryview, payload: memoryview) -> bytes:
        return blake3(header[:_MAC_AT], key=self._secret).update(payload).digest()
