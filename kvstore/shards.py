"""How a slot is cut into shards: k pieces of its bytes and m of parity, any k of which give the slot back.

A shard lies in a slot of its own: its bytes, then a trailer that says which shard of which write it is, and the hash of
its bytes. So shards that are torn, old, of another slot or of another write are told apart without asking anybody.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import zfec
from xxhash import xxh3_64_intdigest

from deepinfer_kvstore.code import TRAILER_BYTES, Code

_TRAILER: Any = np.dtype(
    [("magic", "<u4"), ("index", "<u4"), ("slot", "<u8"), ("set", "<u8"), ("write", "<u8", 2), ("hash", "<u8")]
)
assert _TRAILER.itemsize == TRAILER_BYTES
_MAGIC = 0x31434544  # "DEC1"

Write = tuple[int, int]
"""Identity of one write of a slot, two u64: drawn by its process, then counted. Shards of two writes never mix."""
Rows = Any
"""Array of bytes [k + m, slots, stored_bytes], C-contiguous: row i holds the stored shards number i of a run."""


class Shards:
    """Cuts slots into shards and puts them together. Thread-safe: holds nothing that changes."""

    def __init__(self, code: Code, slot_bytes: int, stripe_set: int) -> None:
        """`stripe_set` is a u64 that differs between sets of roots."""
        self.code = code
        self.slot_bytes = slot_bytes
        self.shard_bytes = code.shard_bytes(slot_bytes)
        self.stored_bytes = code.stored_bytes(slot_bytes)
        self.set_id = stripe_set
        self._heads = (np.arange(code.data, dtype=np.uint64) << 32 | _MAGIC)[:, None]
        # zfec counts all shards where others count the parity.
        self._encoder = zfec.Encoder(code.data, code.shards)
        self._decoder = zfec.Decoder(code.data, code.shards)

    def cut(self, rows: Rows, first_slot: int, buffers: Iterable[memoryview], write: Write) -> None:
        """Fill `rows` from the bytes of consecutive slots, the first of which is number `first_slot`."""
        data, size = self.code.data, self.shard_bytes
        for slot, pieces in enumerate(self.by_slot(buffers)):
            shards = rows[:data, slot, :size]
            for shard, part in _spans(shards, pieces):
                shard[...] = part
            self._pad(shards)
            parity = self._encoder.encode(tuple(shards), tuple(range(data, self.code.shards)))
            for row, made in enumerate(parity, data):
                rows[row, slot, :size] = np.frombuffer(made, np.uint8)
        trailers = self._trailers(rows)
        trailers["magic"], trailers["set"], trailers["write"] = _MAGIC, self.set_id, write
        trailers["index"] = np.arange(self.code.shards)[:, None]
        trailers["slot"] = np.arange(first_slot, first_slot + rows.shape[1])
        trailers["hash"] = self._hashes(rows, range(self.code.shards))
        rows[:, :, size + TRAILER_BYTES :] = 0

    def check(
        self, rows: Rows, first_slot: int, indices: Sequence[int], *, hashes: bool = True
    ) -> tuple[Any, Any, int]:
        """Which shards of the rows `indices` are whole and of this slot, and of which writes.

        Without `hashes`, bytes that are not those of the trailer go unnoticed.

        Returns:
            Arrays bool [rows, slots] and u64 [rows, slots, 2], and how many of the others were not just never written.
        """
        trailers = self._trailers(rows)[list(indices)]
        whole = self._as_expected(trailers, indices, first_slot)
        if hashes:
            whole &= trailers["hash"] == self._hashes(rows, indices)
        return whole, trailers["write"], int(np.count_nonzero(~whole & (trailers["magic"] != 0)))

    def are_whole(self, rests: memoryview, slots: int, first_slot: int, hashes: Sequence[int]) -> bool:
        """Whether data shards are of consecutive slots, of one write for each slot, and whole.

        Args:
            rests: What was stored behind the bytes of each shard, [data shard, slot].
            hashes: Of their bytes, in the same order; empty: they are not looked at.
        """
        rows = np.frombuffer(rests, np.uint8).reshape(self.code.data, slots, -1)
        words = rows[:, :, :TRAILER_BYTES].view("<u8")  # magic and index, slot, set, write, hash
        if not (words[:, :, 0] == self._heads).all() or (words[0, :, 2] != self.set_id).any():
            return False
        if not (words[:, :, 1:5] == words[0, :, 1:5]).all():
            return False
        if (words[0, :, 1] != np.arange(first_slot, first_slot + slots, dtype=np.uint64)).any():
            return False
        return not hashes or bool((words[:, :, 5].reshape(-1) == np.array(hashes, np.uint64)).all())

    def join(self, rows: Rows, slot: int, indices: Sequence[int], pieces: "Pieces") -> int:
        """Write the bytes of the run's slot number `slot` into `pieces`, from its shards `indices`, k of one write.

        Returns:
            How many data shards had to be computed.
        """
        shards: Any = rows[: self.code.data, slot, : self.shard_bytes]
        lacking = self.code.data - sum(index < self.code.data for index in indices)
        if lacking:
            # Lists of its own: zfec sorts the ones it is given.
            have = [rows[index, slot, : self.shard_bytes] for index in indices]
            shards = [np.frombuffer(shard, np.uint8) for shard in self._decoder.decode(have, list(indices))]
        for shard, part in _spans(shards, pieces):
            part[...] = shard
        return lacking

    def restore(self, rows: Rows, slot: int, indices: Sequence[int], wanted: int) -> None:
        """Compute the stored shard number `wanted` of the run's slot number `slot` from k others of one write."""
        size = self.shard_bytes
        have = [rows[index, slot, :size] for index in indices]
        data = self._decoder.decode(have, list(indices))
        made = data[wanted] if wanted < self.code.data else self._encoder.encode(tuple(data), (wanted,))[0]
        rows[wanted, slot, :size] = np.frombuffer(made, np.uint8)
        trailers = self._trailers(rows)[:, slot]
        trailers[wanted] = trailers[indices[0]]
        trailers["index"][wanted] = wanted
        trailers["hash"][wanted] = xxh3_64_intdigest(rows[wanted, slot, :size])
        rows[wanted, slot, size + TRAILER_BYTES :] = 0

    def by_slot(self, buffers: Iterable[memoryview]) -> "Iterator[Pieces]":
        """`buffers`, cut at the ends of slots."""
        pieces: list[tuple[int, memoryview]] = []
        at = 0
        for buffer in buffers:
            left = buffer.cast("B")
            while left.nbytes:
                piece = left[: self.slot_bytes - at]
                pieces.append((at, piece))
                at += piece.nbytes
                left = left[piece.nbytes :]
                if at == self.slot_bytes:
                    yield pieces
                    pieces, at = [], 0

    def _as_expected(self, trailers: Any, indices: Sequence[int], first_slot: int) -> Any:
        whole = (trailers["magic"] == _MAGIC) & (trailers["set"] == self.set_id)
        whole &= trailers["index"] == np.array(indices)[:, None]
        whole &= trailers["slot"] == np.arange(first_slot, first_slot + trailers.shape[1])
        return whole

    def _trailers(self, rows: Rows) -> Any:
        return rows[:, :, self.shard_bytes : self.shard_bytes + TRAILER_BYTES].view(_TRAILER)[:, :, 0]

    def _hashes(self, rows: Rows, indices: Iterable[int]) -> Any:
        size, step, slots = self.shard_bytes, self.stored_bytes, rows.shape[1]
        view = memoryview(rows.reshape(-1))
        starts = [(index * slots + slot) * step for index in indices for slot in range(slots)]
        found = [xxh3_64_intdigest(view[start : start + size]) for start in starts]
        return np.array(found, np.uint64).reshape(-1, slots)

    def _pad(self, shards: Any) -> None:
        for row in range(self.slot_bytes // self.shard_bytes, self.code.data):
            shards[row, max(self.slot_bytes - row * self.shard_bytes, 0) :] = 0


Pieces = Sequence[tuple[int, memoryview]]
"""The buffers of one slot, each with where in the slot it begins."""


def _spans(shards: Any, pieces: Pieces) -> Iterator[tuple[Any, Any]]:
    """Pairs of equal parts of `shards`, which are laid end to end, and of `pieces`.

    What lies in one piece as whole shards is one pair where they are rows of an array: few calls for many bytes.
    """
    size = shards[0].shape[0]
    for at, buffer in pieces:
        piece = np.frombuffer(buffer, np.uint8)
        end = at + piece.shape[0]
        first, last = -(-at // size), end // size
        if not isinstance(shards, np.ndarray) or first >= last:
            first = last = end // size + 1
        done = 0
        while done < piece.shape[0]:
            row, begin = divmod(at + done, size)
            if row == first:
                length = (last - first) * size
                yield shards[first:last], piece[done : done + length].reshape(-1, size)
            else:
                length = min(size - begin, piece.shape[0] - done)
                yield shards[row][begin : begin + length], piece[done : done + length]
            done += length
