"""Bringing an index up to date with the journals: what is new in them, and what their owners must hear of it."""

import struct
from dataclasses import dataclass, field
from typing import Any

from deepinfer_kvstore.entry import Entry, Location
from deepinfer_kvstore.environment import Environment
from deepinfer_kvstore.fold import FREED, LOST, QUEUED, SLOT, Fold
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.record import RECORD_BYTES, Op, Record

TRANSACTION_RECORDS = 8192
"""Records in one transaction: each may dirty two pages, and LMDB keeps dirty pages in memory until it commits."""
_POSITION = struct.Struct("<16sQ")
"""Row of a journal: its identity, and the offset up to which it has been applied."""


@dataclass
class Applied:
    """What one `sync` did."""

    puts: int = 0
    deletes: int = 0
    touches: int = 0
    """Records applied, those that changed nothing included."""
    freed: list[Location] = field(default_factory=list)
    """Slots of the owners whose block is deleted. An owner may be told twice, and of blocks it has written over since:
    a slot is free only while the generation is its own."""
    superseded: list[Record] = field(default_factory=list)
    """DELETE records for the owners to append to a journal: blocks of theirs that lost to another of the same key."""


class Follower:
    """Follows journals into one environment, in which others may do the same. For one thread at a time."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._positions: dict[str, tuple[bytes, int]] = {}
        self._positions_at = self._drained_at = (-1, 0)
        self._watching: tuple[int, frozenset[int]] | None = None

    def follow(self, journals: JournalSet, owners: frozenset[int], applied: Applied) -> None:
        """See `Index.sync`. What was done is added to `applied`.

        Raises:
            lmdb.Error, struct.error, OSError: the index cannot be read or written.
        """
        if owners:
            self._watch(owners)
        while self._apply_news(journals, applied) and not self._environment.replaced():  # what is written then is lost
            pass
        if owners:
            self._drain(owners, applied)

    def _watch(self, owners: frozenset[int]) -> None:
        wanted = self._environment.last_transaction()[0], owners
        if self._watching == wanted:
            return

        def change(transaction: Any) -> None:
            databases = self._environment.databases
            for owner in owners:
                transaction.put(owner.to_bytes(4, "big"), b"", db=databases[b"watched"])
            with transaction.cursor(db=databases[b"rivals"]) as cursor:
                for name, packed in cursor:
                    location = Entry.unpack(packed).location
                    if location.writer in owners:
                        lost = QUEUED.pack(location.generation, LOST, name[: -SLOT.size])
                        transaction.put(name[-SLOT.size :], lost, db=databases[b"queue"])

        self._environment.write(change)
        self._watching = wanted

    def _apply_news(self, journals: JournalSet, applied: Applied) -> bool:
        """Apply a transaction's worth of records; whether there may be more."""
        names = journals.names()
        self._load_positions()
        news: list[tuple[str, bytes, int, list[Record], int]] = []
        room = TRANSACTION_RECORDS
        for name in names:
            identity = journals.identity(name)
            if identity is None:
                continue
            known, offset = self._positions.get(name, (b"", 0))
            start = offset if known == identity else RECORD_BYTES
            records, end = journals.read(name, start, room)
            if end != start or known != identity:
                news.append((name, identity, start, records, end))
                room -= len(records)
            if not room:
                break
        gone = self._positions.keys() - set(names)
        if not news and not gone:
            return False

        def change(transaction: Any) -> None:
            databases = self._environment.databases
            with transaction.cursor(db=databases[b"watched"]) as cursor:
                watched = {int.from_bytes(name, "big") for name, _ in cursor}
            fold = Fold(transaction, databases, watched)
            for name, identity, start, records, end in news:
                row = transaction.get(name.encode(), db=databases[b"journals"])
                known, done = _POSITION.unpack(row) if row else (b"", 0)
                if known != identity:
                    done = RECORD_BYTES
                if start > done:  # the index was begun anew since we read: what lies between is not applied
                    continue
                # Another process may have been faster. Applying again what it has applied would do no harm.
                for record in records[(done - start) // RECORD_BYTES :]:
                    fold.apply(*record)
                position = end if end < start else max(end, done)
                transaction.put(name.encode(), _POSITION.pack(identity, position), db=databases[b"journals"])
            for name in gone:
                transaction.delete(name.encode(), db=databases[b"journals"])
            fold.finish()

        self._environment.write(change)
        for _, _, _, records, _ in news:
            applied.puts += sum(record.op == Op.PUT for record in records)
            applied.deletes += sum(record.op == Op.DELETE for record in records)
            applied.touches += sum(record.op == Op.TOUCH for record in records)
        return not room

    def _load_positions(self) -> None:
        at = self._environment.last_transaction()
        if at == self._positions_at:
            return
        with self._environment.read(b"journals") as transaction, transaction.cursor() as cursor:
            self._positions = {name.decode(): _POSITION.unpack(row) for name, row in cursor}
        self._positions_at = at

    def _drain(self, owners: frozenset[int], applied: Applied) -> None:
        at = self._environment.last_transaction()
        if at == self._drained_at:
            return
        found: list[tuple[bytes, bytes]] = []
        with self._environment.read(b"queue") as transaction, transaction.cursor() as cursor:
            for prefix in (owner.to_bytes(4, "big") for owner in owners):
                more = cursor.set_range(prefix)
                while more and cursor.key().startswith(prefix):
                    found.append((cursor.key(), cursor.value()))
                    more = cursor.next()
        self._drained_at = at
        if not found:
            return

        def change(transaction: Any) -> None:
            queue = self._environment.databases[b"queue"]
            for slot, row in found:
                if transaction.get(slot, db=queue) == row:
                    transaction.delete(slot, db=queue)

        self._environment.write(change)
        for slot, row in found:
            generation, kind, key = QUEUED.unpack(row)
            writer, slab, number = SLOT.unpack(slot)
            location = Location(writer, slab, number, generation)
            if kind == FREED:
                applied.freed.append(location)
            else:
                applied.superseded.append(Record.delete(key, location))
