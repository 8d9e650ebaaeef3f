"""What journals consist of: a header that tells whose they are, and records. Each is 96 bytes."""

import os
import re
import struct
from binascii import crc32
from enum import IntEnum
from typing import NamedTuple

from deepinfer_kvstore.entry import PACKED_BYTES, Entry, Location
from deepinfer_kvstore.keys import KEY_BYTES, Key

RECORD_BYTES = 96
_RECORD = struct.Struct(f"<B{KEY_BYTES}s{PACKED_BYTES}sI")
_HEADER = struct.Struct("<8sI32s16sII24xI")
_MAGIC = b"DIKVJRNL"
_VERSION = 1
_CRC_BYTES = 4
_NAME = re.compile(r"([0-9a-f]{8})\.([0-9a-f]{8})(?:-([0-9a-f]{4,}))?\.log")


class Op(IntEnum):
    """What a record says of the block at its entry's location. Numbers are on disk."""

    PUT = 1
    """It is there, under the record's key."""
    DELETE = 2
    """It is gone for good: the slot's owner may write another into the slot."""
    TOUCH = 3
    """It was used at `touched_ms`. `ttl_class` is 0 unless its user needs it for longer than those before."""


_OPS = {int(op): op for op in Op}


class Record(NamedTuple):
    """One line of a journal."""

    op: Op
    key: Key
    entry: Entry

    @classmethod
    def delete(cls, key: Key, location: Location) -> "Record":
        """That the block of `key` at `location` is gone: nothing but where counts."""
        return cls(Op.DELETE, key, Entry(location, 0, bytes(8), 0, 0, 0, 0, 0))

    @classmethod
    def touch(cls, key: Key, entry: Entry, touched_ms: int, ttl_class: int = 0) -> "Record":
        """That block `entry` was used, by a user of class `ttl_class`."""
        longer = ttl_class if ttl_class > entry.ttl_class else 0
        return cls(Op.TOUCH, key, entry._replace(touched_ms=touched_ms, ttl_class=longer))

    def pack(self) -> bytes:
        """The record as it lies in a journal, `RECORD_BYTES` long."""
        packed = _RECORD.pack(self.op, self.key, self.entry.pack(), 0)
        return packed[:-_CRC_BYTES] + crc32(packed[:-_CRC_BYTES]).to_bytes(_CRC_BYTES, "little")


def unpack_record(packed: bytes | memoryview) -> Record | None:
    """The record that `pack` wrote; None for any other `RECORD_BYTES` bytes."""
    number, key, entry, crc = _RECORD.unpack(packed)
    op = _OPS.get(number)
    return Record(op, key, Entry.unpack(entry)) if op and crc32(packed[:-_CRC_BYTES]) == crc else None


class JournalName(NamedTuple):
    """What the name of a journal file says."""

    writer: int
    epoch: int
    part: int
    """Number of the file among those of one epoch: compaction begins a new one."""

    @classmethod
    def parse(cls, name: str) -> "JournalName | None":
        """None: not the name of a journal."""
        match = _NAME.fullmatch(name)
        return match and cls(int(match[1], 16), int(match[2], 16), int(match[3] or "0", 16))

    def __str__(self) -> str:
        part = f"-{self.part:04x}" if self.part else ""
        return f"{self.writer:08x}.{self.epoch:08x}{part}.log"


def pack_header(namespace: bytes, name: JournalName) -> bytes:
    """The begin of a new journal: `RECORD_BYTES`, with an identity that no other has."""
    packed = _HEADER.pack(_MAGIC, _VERSION, namespace, os.urandom(16), name.writer, name.epoch, 0)
    return packed[:-_CRC_BYTES] + crc32(packed[:-_CRC_BYTES]).to_bytes(_CRC_BYTES, "little")


def identity_of(header: bytes, namespace: bytes) -> bytes | None:
    """16 bytes that tell a journal from others of its name; None where it is no journal of this namespace."""
    if len(header) < RECORD_BYTES:
        return None
    magic, version, found, identity, _, _, crc = _HEADER.unpack(header)
    intact = magic == _MAGIC and version == _VERSION and crc == crc32(header[:-_CRC_BYTES])
    return identity if intact and found == namespace else None
