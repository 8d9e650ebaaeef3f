"""The index of a namespace on one node: which blocks there are, and where. A fold of the journals, kept in LMDB.

Any number of processes may read it and bring it up to date. It never raises for what it finds on disk: what cannot be
read is a miss, and a damaged file is begun anew at the next `sync`.
"""

import logging
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import lmdb

from deepinfer_kvstore.entry import Entry, Location
from deepinfer_kvstore.environment import MAP_BYTES, Environment, boot_id
from deepinfer_kvstore.fold import FREED, LIFE, LOST, QUEUED, SLOT, STORED, SUM, TOUCHED, Fold, condense
from deepinfer_kvstore.journal import RECORD_BYTES, JournalSet, Op, Record
from deepinfer_kvstore.keys import Key

log = logging.getLogger(__name__)

T = TypeVar("T")

TRANSACTION_RECORDS = 8192
"""Records in one transaction: each may dirty two pages, and LMDB keeps dirty pages in memory until it commits."""
_POSITION = struct.Struct("<16sQ")
"""Row of a journal: its identity, and the offset up to which it has been applied."""
_DAMAGE = (
    lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.PanicError, lmdb.VersionMismatchError,
    lmdb.IncompatibleError, lmdb.BadDbiError, lmdb.PageFullError, lmdb.CursorFullError, struct.error,
)  # fmt: skip
"""Other errors pass by themselves: a full disk, too many readers."""


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


class Totals(NamedTuple):
    """Sums over the index, kept up to date with it."""

    keys: int
    bytes: int
    """Payload bytes of the blocks that readers see."""
    slots: int
    """Slots in use: more than `keys` while rivals of blocks are not yet deleted."""
    by_tenant: dict[int, tuple[int, int]]
    """Keys and payload bytes, by tag."""
    by_ttl: dict[int, tuple[int, int]]
    """Keys and payload bytes, by class."""


class Index:
    """One namespace's index. Thread-safe. A forked child has only misses; it opens its own."""

    @classmethod
    def open(
        cls,
        path: Path,
        namespace: bytes,
        *,
        root: Path | str = "",
        map_bytes: int = MAP_BYTES,
        boot: Callable[[], str] = boot_id,
    ) -> "Index":
        """The index in directory `path`, on a local disk, of the namespace of digest `namespace` under `root`.

        Raises:
            StoreConfigError: `path` is on a network file system, cannot be written, or belongs to another root.
        """
        return cls(Environment.share(Path(path), {"namespace": namespace.hex(), "root": str(root)}, map_bytes, boot))

    def __init__(self, environment: Environment) -> None:
        """See `open`."""
        self._environment = environment
        self._syncing = Lock()
        self._damaged = False
        self._reported = ""
        self._closed = False
        self._positions: dict[str, tuple[bytes, int]] = {}
        self._positions_at = self._drained_at = (-1, 0)
        self._watching: tuple[int, frozenset[int]] | None = None

    @property
    def path(self) -> Path:
        """The directory that it is in."""
        return self._environment.path

    @property
    def needs_rebuild(self) -> bool:
        """Whether the file was found damaged. Everything is a miss until `sync` has begun a new one."""
        return self._damaged

    def get(self, key: Key) -> Entry | None:
        """Where `key` is stored."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[Key]) -> list[Entry | None]:
        """Where each key is stored, as of one moment."""

        def look(transaction: Any) -> list[Entry | None]:
            found, unpack = transaction.get, Entry.unpack
            return [packed and unpack(packed) for packed in map(found, keys)]

        return self._read(look, [None] * len(keys), b"keys")

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is stored, as of one moment."""

        def look(transaction: Any) -> list[bool]:
            return [packed is not None for packed in map(transaction.get, keys)]

        return self._read(look, [False] * len(keys), b"keys")

    def longest_prefix(self, keys: Sequence[Key]) -> int:
        """How many leading keys are stored, by binary search: exact where a stored block's predecessors are stored."""

        def look(transaction: Any) -> int:
            low, high = 0, len(keys)
            while low < high:
                middle = (low + high) // 2
                if transaction.get(keys[middle]) is None:
                    high = middle
                else:
                    low = middle + 1
            return low

        return self._read(look, 0, b"keys")

    def entries(self, after: Key | None = None, limit: int = 1024) -> list[tuple[Key, Entry]]:
        """Up to `limit` blocks in the order of their keys, behind key `after`. Empty at the end."""

        def look(transaction: Any) -> list[tuple[Key, Entry]]:
            found: list[tuple[Key, Entry]] = []
            with transaction.cursor() as cursor:
                more = cursor.set_range(after or b"\0")
                while more and len(found) < limit:
                    if cursor.key() != after:
                        found.append((cursor.key(), Entry.unpack(cursor.value())))
                    more = cursor.next()
            return found

        return self._read(look, [], b"keys")

    def slots_of(self, writer: int, slab: int) -> list[tuple[int, Key, int]]:
        """Slots of a slab that hold blocks, rivals included: number, key, generation."""
        lives = self.lives_of(writer, slab).items()
        return [(slot, key, generation) for slot, (generation, key) in lives if key is not None]

    def lives_of(self, writer: int, slab: int) -> dict[int, tuple[int, Key | None]]:
        """What is known of each slot of a slab: generation, and key of the block; None where it is deleted."""
        prefix = SLOT.pack(writer, slab, 0)[:8]

        def look(transaction: Any) -> dict[int, tuple[int, Key | None]]:
            found: dict[int, tuple[int, Key | None]] = {}
            with transaction.cursor() as cursor:
                more = cursor.set_range(prefix)
                while more and cursor.key().startswith(prefix):
                    generation, state = LIFE.unpack_from(row := cursor.value())
                    if state != TOUCHED:
                        key = row[LIFE.size :] if state == STORED else None
                        found[SLOT.unpack(cursor.key())[2]] = generation, key
                    more = cursor.next()
            return found

        return self._read(look, {}, b"slots")

    def slabs(self) -> list[tuple[int, int]]:
        """Writer and number of the slabs that records have named."""

        def look(transaction: Any) -> list[tuple[int, int]]:
            found: list[tuple[int, int]] = []
            with transaction.cursor() as cursor:
                more = cursor.first()
                while more:
                    writer, slab, _ = SLOT.unpack(cursor.key())
                    found.append((writer, slab))
                    more = cursor.set_range(SLOT.pack(writer, slab, 0xFFFFFFFF) + b"\0")
            return found

        return self._read(look, [], b"slots")

    def totals(self) -> Totals:
        """Sums over the index, without looking at its entries."""

        def look(transaction: Any) -> Totals:
            sums: dict[bytes, tuple[int, int]] = {}
            with transaction.cursor() as cursor:
                for name, packed in cursor:
                    sums[name] = SUM.unpack(packed)
            tenants = {int.from_bytes(name[6:], "big"): sums[name] for name in sums if name.startswith(b"tenant")}
            ttls = {name[3]: sums[name] for name in sums if name.startswith(b"ttl")}
            return Totals(*sums.get(b"keys", (0, 0)), sums.get(b"slots", (0, 0))[0], tenants, ttls)

        return self._read(look, Totals(0, 0, 0, {}, {}), b"totals")

    def condense(self, records: Sequence[Record]) -> list[Record]:
        """Of records read from journals, those without which the index could not be made again."""

        def look(transaction: Any) -> list[Record]:
            databases = self._environment.databases
            return [left for record in records if (left := condense(record, transaction, databases))]

        return self._read(look, list(records), b"slots")

    def sync(self, journals: JournalSet, owners: Collection[int] = ()) -> Applied:
        """Apply what is new in `journals`, to its end. Other processes may be at it too.

        `owners` are the writers that this process is: from their first `sync` on it is told of slots of theirs that
        are freed and of blocks that lost, whichever process applied the record.
        """
        applied = Applied()
        with self._syncing:
            if not self._environment.usable:
                return applied
            try:
                self._heal()
                if owners:
                    self._watch(frozenset(owners))
                while self._apply_news(journals, applied):
                    pass
                if owners:
                    self._drain(owners, applied)
            except (lmdb.Error, struct.error, OSError) as error:
                self._failed(error)
        return applied

    def begin_anew(self) -> None:
        """Throw the index away: the next `sync` makes it again, and until then everything is a miss."""
        self._damaged = True

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._environment.release()

    def _read(self, look: Callable[[Any], T], default: T, database: bytes) -> T:
        """What `look` finds with a transaction on `database`; `default` where it cannot be read."""
        try:
            with self._environment.read(database) as transaction:
                return look(transaction)
        except (lmdb.Error, struct.error) as error:
            self._failed(error)
            return default

    def _failed(self, error: Exception) -> None:
        """Note damage, and say once what is wrong. A closed index has misses and says nothing."""
        if not self._environment.usable:
            return
        self._damaged |= isinstance(error, _DAMAGE)
        if str(error) != self._reported:
            self._reported = str(error)
            remedy = "it is made again from the journals" if self._damaged else "blocks count as missing meanwhile"
            log.warning("index %s: %s: %s", self._environment.path, error, remedy)

    def _heal(self) -> None:
        if self._damaged or self._environment.replaced():
            self._environment.reopen(discard=self._damaged)
            self._damaged = False

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

    def _drain(self, owners: Collection[int], applied: Applied) -> None:
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
