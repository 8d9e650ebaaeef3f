"""How slabs are cut into slots. A namespace has one slot size, so that every reader knows where headers are."""

from dataclasses import dataclass

from deepinfer_kvstore.errors import StoreConfigError

PAGE_BYTES = 4096
HEADER_BYTES = 512
"""Room of the header, at the very end of a slot."""
MAX_PAYLOAD_BYTES = 1 << 30


@dataclass(frozen=True)
class Geometry:
    """A slab's slots."""

    slot_bytes: int
    slab_slots: int

    @classmethod
    def of(cls, payload_bytes: int, slab_bytes: int, *, power_of_two: bool = False) -> "Geometry":
        """Slots for payloads up to `payload_bytes`, as many as fit into `slab_bytes`.

        `power_of_two` makes a slot one 3FS chunk, which 3FS can take back alone.

        Raises:
            StoreConfigError: not one slot fits.
        """
        if not 0 < payload_bytes <= MAX_PAYLOAD_BYTES:
            raise StoreConfigError(f"a block has {payload_bytes} bytes: it must have 1 to {MAX_PAYLOAD_BYTES}")
        slot_bytes = -(-(payload_bytes + HEADER_BYTES) // PAGE_BYTES) * PAGE_BYTES
        if power_of_two:
            slot_bytes = 1 << (slot_bytes - 1).bit_length()
        if slab_bytes < slot_bytes:
            raise StoreConfigError(f"slab_bytes is {slab_bytes}, one slot takes {slot_bytes}: raise slab_bytes")
        return cls(slot_bytes, slab_bytes // slot_bytes)

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab."""
        return self.slot_bytes * self.slab_slots
