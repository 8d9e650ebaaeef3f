"""Records and journals for tests of the index."""

from collections.abc import Iterable
from pathlib import Path

from deepinfer_kvstore.entry import Entry, Location
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.keys import Key, make_key
from deepinfer_kvstore.record import Op, Record

NAMESPACE = bytes(range(32))


def key(number: int) -> Key:
    """The key of test block `number`."""
    return make_key(1, number.to_bytes(32, "big"))


def entry(
    slot: int,
    *,
    writer: int = 1,
    generation: int = 1,
    created: int = 1000,
    touched: int = 0,
    ttl: int = 0,
    tenant: int = 0,
) -> Entry:
    """An entry of 100 bytes in slab 0 of `writer`."""
    location = Location(writer, 0, slot, generation)
    return Entry(location, 100, bytes(8), 64, created, touched or created, ttl, tenant)


def put(number: int, **fields: int) -> Record:
    """Block `number`, in the slot of its number unless told another."""
    return Record(Op.PUT, key(number), entry(fields.pop("slot", number), **fields))


def delete(record: Record) -> Record:
    """The record that ends what `record` began."""
    return record._replace(op=Op.DELETE)


def touch(record: Record, touched: int, ttl: int = 0) -> Record:
    """A use of the block of `record`."""
    return record._replace(op=Op.TOUCH, entry=record.entry._replace(touched_ms=touched, ttl_class=ttl))


def write(directory: Path, records: Iterable[Record], *, writer: int = 1, epoch: int = 1) -> JournalWriter:
    """A new journal with `records` in it."""
    journal = JournalWriter([directory], writer, epoch, NAMESPACE)
    journal.append(list(records))
    return journal
