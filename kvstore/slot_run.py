"""Blocks in neighbouring slots of one slab, which one read brings."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from deepinfer_kvstore.entry import Location, Place
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.slabs import slab_name

MAX_SLOTS_PER_CALL = 512
"""Two buffers each, of the 1024 that Linux takes at once."""


class SlotRun(NamedTuple):
    """Blocks to load, as columns: block i lies in slot `first + i`."""

    writer: int
    slab: int
    first: int
    numbers: Sequence[int]
    """Of the blocks, in their transfer."""
    keys: Sequence[Key]
    generations: Sequence[int]
    buffers: Sequence[memoryview]
    """Where each is to go: writable, flat, of the block's length."""

    @property
    def slab_name(self) -> str:
        """File name of their slab."""
        return slab_name(self.writer, self.slab)

    def location(self, block: int) -> Location:
        """Where the index has block i."""
        return Location(self.writer, self.slab, self.first + block, self.generations[block])

    def part(self, begin: int, end: int) -> "SlotRun":
        """Blocks `begin` to `end`."""
        some = slice(begin, end)
        return SlotRun(
            self.writer,
            self.slab,
            self.first + begin,
            self.numbers[some],
            self.keys[some],
            self.generations[some],
            self.buffers[some],
        )

    def blocks(self) -> Iterator["SlotRun"]:
        """Each block, as a run of one."""
        return (self.part(block, block + 1) for block in range(len(self.keys)))


def runs_of(
    numbers: Iterable[int],
    places: Sequence[Place | None],
    keys: Sequence[Key],
    buffers: Sequence[memoryview],
    limit: int,
) -> Iterator[SlotRun]:
    """Blocks `numbers` of a transfer, all of which have places: neighbouring slots together, at most `limit`."""
    found = sorted((place, number) for number in numbers if (place := places[number]))
    begin = 0
    due = None
    for at, ((writer, slab, slot, _, _), _) in enumerate(found):
        if (writer, slab, slot - at) != due or at - begin == limit:
            if at:
                yield _run(found[begin:at], keys, buffers)
            begin, due = at, (writer, slab, slot - at)
    if found:
        yield _run(found[begin:], keys, buffers)


def _run(found: Sequence[tuple[Place, int]], keys: Sequence[Key], buffers: Sequence[memoryview]) -> SlotRun:
    writer, slab, first, _, _ = found[0][0]
    return SlotRun(
        writer,
        slab,
        first,
        [number for _, number in found],
        [keys[number] for _, number in found],
        [place[4] for place, _ in found],
        [buffers[number] for _, number in found],
    )
