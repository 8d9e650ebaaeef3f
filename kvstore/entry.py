"""What the index knows of one stored block, and where it lies."""

import struct
import time
from collections.abc import Callable
from typing import NamedTuple

_PLACE = struct.Struct("<IIIIQ")

Place = tuple[int, int, int, int, int]
"""All that a load needs of an entry, and quick to make: writer, slab, slot, length, generation."""
_PACKED = struct.Struct(_PLACE.format + "8sIQQBI")


def wall_ms() -> int:
    """Unix time in milliseconds: the clock of `Entry`'s times."""
    return time.time_ns() // 1_000_000


class Location(NamedTuple):
    """A slot, at one moment of its life: a later block in the same slot has a larger generation."""

    writer: int
    """Identity of the slab's exclusive writer, u32."""
    slab: int
    """Number of the slab among that writer's, u32."""
    slot: int
    """Number of the slot in the slab, u32."""
    generation: int
    """u64; grows with every block its writer writes, over restarts too."""


class Entry(NamedTuple):
    """One stored block."""

    location: Location
    length: int
    """Payload bytes, u32."""
    parent: bytes
    """First 8 bytes of the hash of the block before it in the chain; zeros for the first block."""
    depth: int
    """Tokens from the start of the sequence to the end of this block, u32. Deeper blocks are collected first."""
    created_ms: int
    """Unix time in milliseconds at which it was written."""
    touched_ms: int
    """Unix time in milliseconds of its last use that the index knows of; time to live slides from here."""
    ttl_class: int
    """Number of a class in the retention policy, u8: the longest-lived of its users."""
    tenant: int
    """Tag of the tenant that stored it first, u32; 0 for none. For purging and accounts: isolation is the salt's."""

    def pack(self) -> bytes:
        """The entry as the index and the journals keep it, `PACKED_BYTES` long."""
        writer, slab, slot, generation = self.location
        return _PACKED.pack(
            writer, slab, slot, self.length, generation, self.parent, self.depth,
            self.created_ms, self.touched_ms, self.ttl_class, self.tenant,
        )  # fmt: skip

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> "Entry":
        """The entry that `pack` wrote."""
        # Past the constructors, which take a third of the time: a lookup of a long prompt unpacks thousands.
        writer, slab, slot, length, generation, *rest = _PACKED.unpack(packed)
        location = tuple.__new__(Location, (writer, slab, slot, generation))
        return tuple.__new__(cls, (location, length, *rest))


PACKED_BYTES = _PACKED.size
place_of: Callable[[bytes], Place] = _PLACE.unpack_from
"""The place in the entry that `pack` wrote."""
