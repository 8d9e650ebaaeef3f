"""The index of a namespace on one node: which blocks there are, and where. A fold of the journals, kept in LMDB.

Any number of processes may read it and bring it up to date. It never raises for what it finds on disk: what cannot be
read is a miss, and a damaged file is begun anew at the next `sync`.
"""

import logging
import struct
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import lmdb

from deepinfer_kvstore.entry import Entry, Place, place_of
from deepinfer_kvstore.environment import DAMAGE, MAP_BYTES, Environment
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.fold import LIFE, SLOT, STORED, SUM, TOUCHED, condense
from deepinfer_kvstore.follower import Applied, Follower
from deepinfer_kvstore.index_files import boot_id
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.record import Record

T = TypeVar("T")

_log = logging.getLogger(__name__)


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
        self._follower = Follower(environment)

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

    def places(self, keys: Sequence[Key]) -> list[Place | None]:
        """Where what `get_many` finds lies, in a third of its time."""

        def look(transaction: Any) -> list[Place | None]:
            return [packed and place_of(packed) for packed in map(transaction.get, keys)]

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

    def used_slots(self) -> int:
        """`Totals.slots` alone: at a cost that does not grow with the number of tenants."""

        def look(transaction: Any) -> int:
            packed = transaction.get(b"slots")
            return int(SUM.unpack(packed)[0]) if packed else 0

        return self._read(look, 0, b"totals")

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
            if self._environment.usable:
                try:
                    self._heal()
                    self._follower.follow(journals, frozenset(owners), applied)
                except (lmdb.Error, struct.error, OSError, StoreConfigError) as error:
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
        self._damaged |= isinstance(error, (*DAMAGE, struct.error))
        if str(error) != self._reported:
            self._reported = str(error)
            remedy = "it is made again from the journals" if self._damaged else "blocks count as missing meanwhile"
            _log.warning("index %s: %s: %s", self._environment.path, error, remedy)

    def _heal(self) -> None:
        if self._damaged or self._environment.replaced():
            self._environment.reopen(discard=self._damaged)
            self._damaged = False
