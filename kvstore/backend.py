"""What holds slabs: the protocol between the store and posix, memory, USRBIO and erasure-coded back ends."""

from collections.abc import Sequence
from typing import Protocol

Buffers = Sequence[memoryview]
"""Consecutive pieces of one transfer, writable for reads. Any alignment; where aligned memory is needed, it copies."""


def flat(buffer: memoryview) -> memoryview:
    """`buffer` as bytes."""
    return buffer if buffer.ndim == 1 and buffer.format == "B" else buffer.cast("B")


class ShortRead(OSError):
    """An EIO: the slab ended before the slots did, for somebody cut it. The disk is well."""


class Slab(Protocol):
    """One open slab of fixed slots.

    Every call blocks until the bytes have moved and may be made from several threads at once, on distinct slots.
    `first_slot` is where the transfer starts; `buffers` together are a whole number of slots, which follow each other.
    """

    name: str
    slot_bytes: int
    slots: int

    def readv(self, first_slot: int, buffers: Buffers) -> None:
        """Fill `buffers`.

        Raises:
            OSError: not every byte could be read (the end of the slab is `ShortRead`, its own deadline ETIMEDOUT). What
                the buffers hold is then undefined, and no thread touches them any more.
        """

    def writev(self, first_slot: int, buffers: Buffers) -> None:
        """Write `buffers`. Only the slab's exclusive writer may.

        Raises:
            OSError: not every byte was written. The slots are then torn.
        """

    def punch(self, first_slot: int, slots: int) -> None:
        """Give the storage of slots back where the back end can; they read as zeros or as EIO after it."""

    def sync(self) -> None:
        """Return once written bytes survive a power loss."""

    def close(self) -> None:
        """Idempotent."""


class Backend(Protocol):
    """Slabs by name, of one namespace."""

    def create(self, name: str, slot_bytes: int, slots: int) -> Slab:
        """A new slab, its space reserved, open for writing.

        Raises:
            FileExistsError: the name is taken.
            OSError: no space, no permission.
        """

    def open(self, name: str, *, write: bool) -> Slab:
        """An existing slab.

        Raises:
            FileNotFoundError: there is none (any more).
        """

    def names(self) -> list[str]:
        """Names of all slabs, in no order."""

    def remove(self, name: str) -> None:
        """Remove a slab; readers that have it open may read on. No error where there is none."""

    def free_bytes(self) -> int:
        """Bytes that new slabs may still take."""

    def close(self) -> None:
        """Idempotent."""
