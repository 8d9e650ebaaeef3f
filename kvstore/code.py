"""The erasure code of a store: into how many shards a slot is cut, and how many of them may be lost."""

from dataclasses import dataclass

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.geometry import PAGE_BYTES

MAX_SHARDS = 32
TRAILER_BYTES = 48
_ALIGN = 16


@dataclass(frozen=True)
class Code:
    """k data shards and m parity shards."""

    data: int
    parity: int

    @classmethod
    def parse(cls, text: str) -> "Code":
        """The code written "k+m".

        Raises:
            StoreConfigError: not that, or numbers out of range.
        """
        data, plus, parity = text.partition("+")
        if not (plus and data.isdecimal() and parity.isdecimal()):
            raise StoreConfigError(f"erasure code {text!r}: write it k+m, as in 10+2")
        code = cls(int(data), int(parity))
        if not (code.data and code.parity and code.shards <= MAX_SHARDS):
            raise StoreConfigError(f"erasure code {text!r}: k and m must be 1 or more, together {MAX_SHARDS} at most")
        return code

    @property
    def shards(self) -> int:
        """k + m: as many roots."""
        return self.data + self.parity

    def shard_bytes(self, slot_bytes: int) -> int:
        """Bytes of a slot in one shard; the last data shards are filled up with zeros."""
        return -(-slot_bytes // (self.data * _ALIGN)) * _ALIGN

    def stored_bytes(self, slot_bytes: int) -> int:
        """Bytes that a slot takes on each root: a shard, its trailer, zeros to the end of the page."""
        return -(-(self.shard_bytes(slot_bytes) + TRAILER_BYTES) // PAGE_BYTES) * PAGE_BYTES

    def __str__(self) -> str:
        return f"{self.data}+{self.parity}"
