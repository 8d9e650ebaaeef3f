"""Reading slots whose data shards lie in the page cache: straight into the caller's buffers.

Nothing is late here, as the kernel copies or refuses at once; so no private memory is needed between.
"""

import os
from collections.abc import Callable, Sequence

from xxhash import xxh3_64, xxh3_64_intdigest

from deepinfer_kvstore.backend import Buffers
from deepinfer_kvstore.shards import Pieces, Shards

_IOV_MAX = os.sysconf("SC_IOV_MAX")

CachedRead = Callable[[int, int, Buffers], bool]
"""Reads so many slots from one on, if that takes no waiting; whether it did."""


def read_cached(
    shards: Shards, reads: Sequence[CachedRead], first_slot: int, slots: list[Pieces], *, verify: bool
) -> bool:
    """Fill the pieces of some slots by `reads`, one for each data shard; whether all came and were of one write.

    With `verify`, also whether their hashes are right. What the pieces hold is undefined if not.
    """
    size, rest_bytes, count = shards.shard_bytes, shards.stored_bytes - shards.shard_bytes, len(slots)
    room = memoryview(bytearray(len(reads) * count * rest_bytes))
    rests = [room[at : at + rest_bytes] for at in range(0, len(room), rest_bytes)]
    firsts = [pieces[0][1] for pieces in slots]
    shortest = min(first.nbytes for first in firsts)
    hashes: list[int] = []
    for index, read in enumerate(reads):
        begin, end = index * size, (index + 1) * size
        behind = rests[index * count : (index + 1) * count]
        if end <= shortest:  # nearly always
            parts = [[first[begin:end]] for first in firsts]
            buffers = [buffer for (part,), rest in zip(parts, behind, strict=True) for buffer in (part, rest)]
        else:
            padding = memoryview(bytearray(size))[: size - max(min(end, shards.slot_bytes) - begin, 0)]
            parts = [[*_cut(pieces, begin, end), padding] for pieces in slots]
            buffers = [buffer for part, rest in zip(parts, behind, strict=True) for buffer in (*part, rest)]
        if len(buffers) > _IOV_MAX or not read(first_slot, count, buffers):
            return False
        if verify:
            hashes += [_hash(part) for part in parts]
    return shards.are_whole(room, count, first_slot, hashes)


def _cut(pieces: Pieces, begin: int, end: int) -> list[memoryview]:
    """The bytes from `begin` to `end` of a slot."""
    return [piece[max(begin - at, 0) : end - at] for at, piece in pieces if at < end and begin < at + piece.nbytes]


def _hash(parts: list[memoryview]) -> int:
    if len(parts) == 1:
        return xxh3_64_intdigest(parts[0])
    whole = xxh3_64()
    for part in parts:
        whole.update(part)
    return whole.intdigest()
