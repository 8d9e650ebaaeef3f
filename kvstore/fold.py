"""Folding journal records into the index, so that order does not matter.

For each slot the index keeps its latest life: the largest generation it has heard of, and how far that life has come
(touched < stored < deleted). A record of an earlier life, or one that says less, changes nothing. So the result is a
join: the same for every order of reading the journals, and for records that are read twice.

A key may be stored in several slots at once, by writers that did not know of each other. The block with the smallest
(created_ms, writer, generation) is the one that readers see; the others are its rivals until their owners delete them.
"""

import struct
from collections import defaultdict
from typing import Any

import lmdb

from deepinfer_kvstore.entry import Entry, Location
from deepinfer_kvstore.keys import KEY_BYTES, Key
from deepinfer_kvstore.record import Op, Record

SLOT = struct.Struct(">III")
"""Key of a slot: writer, slab, slot. Slots of a writer, and of a slab, are neighbours."""
LIFE = struct.Struct(">QB")
"""Begin of a slot's row: generation, state. A stored block's key follows; of a touched one, `_TOUCHED`."""
TOUCHED, STORED, DELETED = 1, 2, 3
_UNKNOWN = LIFE.pack(0, 0)
_TOUCHED = struct.Struct(">QB")
QUEUED = struct.Struct(f">QB{KEY_BYTES}s")
"""Row of a slot in the queue of its owner: generation, `FREED` or `LOST`, key."""
FREED, LOST = 1, 2
SUM = struct.Struct("<QQ")
"""Keys and payload bytes."""


def condense(record: Record, transaction: Any, databases: dict[bytes, Any]) -> Record | None:
    """What is left to say of a record once the index knows more: None where another record says it all.

    Of the records that made a slot's row, each that says as much as the row is kept, and so is each that says more.
    """
    location = record.entry.location
    slot = _slot_of(location)
    row = transaction.get(slot, db=databases[b"slots"]) or _UNKNOWN
    generation, state = LIFE.unpack_from(row)
    if generation != location.generation:
        return record if generation < location.generation else None
    if state == DELETED or record.op == Op.DELETE:
        return record if record.op == Op.DELETE else None
    if state == TOUCHED:
        return record
    stored = row[LIFE.size :]
    packed = transaction.get(stored, db=databases[b"keys"])
    if not packed or _slot_of(Entry.unpack(packed).location) != slot:
        packed = transaction.get(stored + slot, db=databases[b"rivals"])
    known = Entry.unpack(packed or b"")
    last, longest = record.entry.touched_ms >= known.touched_ms, record.entry.ttl_class >= known.ttl_class
    if record.op == Op.PUT or last or (longest and record.entry.ttl_class):
        return record._replace(entry=_touched(record.entry, known.touched_ms, known.ttl_class))
    return None


def preference(entry: Entry) -> tuple[int, int, int]:
    """Of two blocks of one key, the one with the smaller is what readers see, on every node."""
    return entry.created_ms, entry.location.writer, entry.location.generation


class Fold:
    """Applies records in one write transaction. Raises `lmdb.Error` where the index contradicts itself."""

    def __init__(self, transaction: Any, databases: dict[bytes, Any], watched: set[int]) -> None:
        """`watched`: writers whose slots are queued for them when they are freed or have lost to a rival."""
        self._transaction = transaction
        self._keys, self._rivals = databases[b"keys"], databases[b"rivals"]
        self._slots, self._queue, self._totals = databases[b"slots"], databases[b"queue"], databases[b"totals"]
        self._watched = watched
        self._groups: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        """Keys and bytes that came, by tenant and class."""
        self._live = [0, 0]

    def apply(self, op: Op, key: Key, entry: Entry) -> None:
        """Apply one record."""
        location = entry.location
        slot = SLOT.pack(location.writer, location.slab, location.slot)
        row = self._transaction.get(slot, db=self._slots) or _UNKNOWN
        generation, state = LIFE.unpack_from(row)
        if generation > location.generation or (generation == location.generation and state == DELETED):
            return
        if generation < location.generation:
            if state == STORED:
                self._remove(row[LIFE.size :], slot)
            state = 0
        if op == Op.DELETE:
            if state == STORED:
                stored = row[LIFE.size :]
                self._remove(stored, slot)
                self._tell(location.writer, slot, location.generation, FREED, stored)
            self._put_slot(slot, LIFE.pack(location.generation, DELETED))
        elif state == STORED:
            self._touch(row[LIFE.size :], slot, entry)
        elif op == Op.PUT:
            if state == TOUCHED:
                entry = _touched(entry, *_TOUCHED.unpack_from(row, LIFE.size))
            self._put_slot(slot, LIFE.pack(location.generation, STORED) + key)
            self._add(key, slot, entry)
        else:
            touched, ttl_class = entry.touched_ms, entry.ttl_class
            if state == TOUCHED:
                known = _TOUCHED.unpack_from(row, LIFE.size)
                touched, ttl_class = max(touched, known[0]), max(ttl_class, known[1])
            self._put_slot(slot, LIFE.pack(location.generation, TOUCHED) + _TOUCHED.pack(touched, ttl_class))

    def finish(self) -> None:
        """Write the totals. Last, in the same transaction."""
        changes: dict[bytes, list[int]] = defaultdict(lambda: [0, 0])
        changes[b"slots"] = self._live
        for (tenant, ttl_class), change in self._groups.items():
            for name in (b"keys", b"tenant" + tenant.to_bytes(4, "big"), b"ttl" + bytes([ttl_class])):
                changes[name][0] += change[0]
                changes[name][1] += change[1]
        for name, change in changes.items():
            keys, held = SUM.unpack(self._transaction.get(name, db=self._totals) or bytes(SUM.size))
            keys, held = keys + change[0], held + change[1]
            if keys:
                self._transaction.put(name, SUM.pack(keys, held), db=self._totals)
            else:
                self._transaction.delete(name, db=self._totals)

    def _put_slot(self, slot: bytes, row: bytes) -> None:
        self._transaction.put(slot, row, db=self._slots)

    def _add(self, key: Key, slot: bytes, entry: Entry) -> None:
        packed = self._transaction.get(key, db=self._keys)
        self._count_slot(entry, 1)
        if packed is None:
            self._show(key, entry)
            return
        other = Entry.unpack(packed)
        loser = max(other, entry, key=preference)
        if loser is other:
            self._count(other, -1)
            self._show(key, entry)
            slot = _slot_of(other.location)
        self._transaction.put(key + slot, loser.pack(), db=self._rivals)
        self._tell(loser.location.writer, slot, loser.location.generation, LOST, key)

    def _remove(self, key: Key, slot: bytes) -> None:
        """Take the block of `key` in `slot` out; a rival comes in its place."""
        packed = self._transaction.get(key, db=self._keys)
        shown = packed and Entry.unpack(packed)
        if not shown or _slot_of(shown.location) != slot:
            self._count_slot(self._rival(key, slot), -1)
            self._transaction.delete(key + slot, db=self._rivals)
            return
        self._count(shown, -1)
        self._count_slot(shown, -1)
        rivals = []
        with self._transaction.cursor(db=self._rivals) as cursor:
            more = cursor.set_range(key)
            while more and cursor.key().startswith(key):
                rivals.append(Entry.unpack(cursor.value()))
                more = cursor.next()
        if rivals:
            best = min(rivals, key=preference)
            self._transaction.delete(key + _slot_of(best.location), db=self._rivals)
            self._show(key, best)
        else:
            self._transaction.delete(key, db=self._keys)

    def _touch(self, key: Key, slot: bytes, entry: Entry) -> None:
        packed = self._transaction.get(key, db=self._keys)
        shown = packed and Entry.unpack(packed)
        if shown and _slot_of(shown.location) == slot:
            later = _touched(shown, entry.touched_ms, entry.ttl_class)
            if later != shown:
                self._count(shown, -1)
                self._show(key, later)
        else:
            later = _touched(self._rival(key, slot), entry.touched_ms, entry.ttl_class)
            self._transaction.put(key + slot, later.pack(), db=self._rivals)

    def _rival(self, key: Key, slot: bytes) -> Entry:
        packed = self._transaction.get(key + slot, db=self._rivals)
        if packed is None:
            raise lmdb.CorruptedError("a stored slot has no entry")
        return Entry.unpack(packed)

    def _show(self, key: Key, entry: Entry) -> None:
        self._transaction.put(key, entry.pack(), db=self._keys)
        self._count(entry, 1)

    def _tell(self, writer: int, slot: bytes, generation: int, kind: int, key: Key) -> None:
        if writer in self._watched:
            self._transaction.put(slot, QUEUED.pack(generation, kind, key), db=self._queue)

    def _count(self, entry: Entry, sign: int) -> None:
        change = self._groups[entry.tenant, entry.ttl_class]
        change[0] += sign
        change[1] += sign * entry.length

    def _count_slot(self, entry: Entry, sign: int) -> None:
        self._live[0] += sign
        self._live[1] += sign * entry.length


def _slot_of(location: Location) -> bytes:
    return SLOT.pack(location.writer, location.slab, location.slot)


def _touched(entry: Entry, touched_ms: int, ttl_class: int) -> Entry:
    """Numbers of classes grow with their time to live, so the longest-lived is the largest."""
    return entry._replace(touched_ms=max(entry.touched_ms, touched_ms), ttl_class=max(entry.ttl_class, ttl_class))
