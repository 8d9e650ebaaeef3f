"""The index as a fold of journals: what readers see, whatever the order in which journals are read."""

from pathlib import Path

import pytest
from blocks import NAMESPACE, delete, entry, key, put, touch, write
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kvstore.follower import Applied
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.record import Record


@pytest.fixture
def journals(tmp_path: Path) -> JournalSet:
    (tmp_path / "journals").mkdir()
    return JournalSet([tmp_path / "journals"], NAMESPACE)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index.open(tmp_path / "index", NAMESPACE)


def journal(tmp_path: Path, records: list[Record], writer: int = 1, epoch: int = 1) -> JournalWriter:
    return write(tmp_path / "journals", records, writer=writer, epoch=epoch)


def test_blocks_are_found_after_a_sync(tmp_path: Path, index: Index, journals: JournalSet) -> None:
    writer = journal(tmp_path, [put(1), put(2)])
    assert index.get(key(1)) is None
    assert index.sync(journals) == Applied(puts=2)
    assert index.get_many([key(2), key(3), key(1)]) == [entry(2), None, entry(1)]
    writer_id, slab, slot, generation = entry(2).location
    assert index.places([key(2), key(3)]) == [(writer_id, slab, slot, entry(2).length, generation), None]
    assert index.contains([key(3), key(1)]) == [False, True]
    assert index.sync(journals) == Applied()
    writer.append([put(3), delete(put(1))])
    assert index.sync(journals) == Applied(puts=1, deletes=1)
    assert index.contains([key(1), key(2), key(3)]) == [False, True, True]
    assert list(index.slots_of(1, 0)) == [(2, key(2), 1), (3, key(3), 1)]


@pytest.mark.parametrize("stored", [0, 1, 2, 7, 8])
def test_longest_prefix_counts_the_leading_blocks(
    tmp_path: Path, index: Index, journals: JournalSet, stored: int
) -> None:
    journal(tmp_path, [put(number) for number in range(stored)])
    index.sync(journals)
    assert index.longest_prefix([key(number) for number in range(8)]) == stored
    assert index.longest_prefix([]) == 0


def test_a_restarted_process_goes_on_where_the_index_is(tmp_path: Path, index: Index, journals: JournalSet) -> None:
    """# LMCache#2273: an index only in RAM finds nothing after a restart."""
    writer = journal(tmp_path, [put(1)])
    index.sync(journals)
    index.close()
    writer.append([put(2)])
    index = Index.open(tmp_path / "index", NAMESPACE)
    assert index.contains([key(1), key(2)]) == [True, False]
    assert index.sync(JournalSet([tmp_path / "journals"], NAMESPACE)).puts == 1
    assert index.contains([key(1), key(2)]) == [True, True]


def test_of_two_blocks_of_a_key_the_older_is_seen_and_the_other_comes_after_it(
    tmp_path: Path, index: Index, journals: JournalSet
) -> None:
    late, early = put(1, writer=1, created=2000), put(1, writer=2, created=1000)
    journal(tmp_path, [late], writer=1)
    index.sync(journals)
    other = journal(tmp_path, [early], writer=2)
    applied = index.sync(journals, owners=[1])
    assert index.get(key(1)) == early.entry
    assert [(record.key, record.entry.location) for record in applied.superseded] == [(key(1), late.entry.location)]
    assert index.totals()[:3] == (1, 100, 2)
    other.append([delete(early)])
    index.sync(journals)
    assert index.get(key(1)) == late.entry


def test_the_owner_hears_of_its_freed_slots_once_whoever_applied_the_record(
    tmp_path: Path, index: Index, journals: JournalSet
) -> None:
    record = put(1, writer=1)
    journal(tmp_path, [record], writer=1)
    index.sync(journals, owners=[1])
    journal(tmp_path, [delete(record)], writer=2)
    assert index.sync(journals, owners=[2]).freed == []
    assert index.sync(journals, owners=[1]).freed == [record.entry.location]
    assert index.sync(journals, owners=[1]).freed == []


def test_a_delete_of_another_life_of_the_slot_is_ignored(tmp_path: Path, index: Index, journals: JournalSet) -> None:
    old, new = put(1, slot=5, generation=1), put(2, slot=5, generation=2)
    journal(tmp_path, [old, new, delete(old)])
    index.sync(journals)
    assert index.contains([key(1), key(2)]) == [False, True]


def test_touches_only_move_forward(tmp_path: Path, index: Index, journals: JournalSet) -> None:
    """A clock that jumps back loses no use, and a class is never shortened."""
    record = put(1, created=1000)
    journal(tmp_path, [record, touch(record, 5000, ttl=3), touch(record, 4000, ttl=1)])
    index.sync(journals)
    found = index.get(key(1))
    assert found is not None
    assert (found.touched_ms, found.ttl_class) == (5000, 3)
    assert index.totals().by_ttl == {3: (1, 100)}


WRITERS = 3
LIVES = [
    put(1, slot=0, writer=0, generation=1, created=30),
    put(1, slot=0, writer=1, generation=1, created=20, tenant=1),
    put(1, slot=1, writer=0, generation=2, created=20),
    put(2, slot=0, writer=0, generation=3, created=10),
    put(2, slot=2, writer=2, generation=1, created=10, tenant=2),
    put(3, slot=0, writer=1, generation=5, created=50),
]
EVENTS = st.lists(
    st.tuples(
        st.integers(0, WRITERS - 1),
        st.sampled_from(LIVES).flatmap(
            lambda life: st.one_of(
                st.just(life),
                st.just(delete(life)),
                st.builds(touch, st.just(life), st.integers(1, 99), st.integers(0, 3)),
            )
        ),
    ),
    max_size=25,
)


def _state(index: Index) -> object:
    entries = index.entries()
    totals = index.totals()
    assert totals.keys == len(entries)
    assert totals.bytes == sum(found.length for _, found in entries)
    slots = [(writer, *slot) for writer in range(WRITERS) for slot in index.slots_of(writer, 0)]
    assert index.used_slots() == totals.slots == len(slots)
    assert sum(keys for keys, _ in totals.by_tenant.values()) == totals.keys
    assert sum(keys for keys, _ in totals.by_ttl.values()) == totals.keys
    return entries, totals, slots


@given(events=EVENTS, order=st.randoms(use_true_random=False))
def test_every_order_of_reading_ends_in_the_same_index(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, Record]], order: object
) -> None:
    """Two nodes, two orders of appends and syncs, one index; and totals are sums over it (# LMCache#4546)."""
    states = []
    for shuffled in (False, True):
        directory = tmp_path_factory.mktemp("node")
        (directory / "journals").mkdir()
        index = Index.open(directory / "index", NAMESPACE)
        journals = JournalSet([directory / "journals"], NAMESPACE)
        queues = [[record for writer, record in events if writer == number] for number in range(WRITERS)]
        writers = [write(directory / "journals", [], writer=number) for number in range(WRITERS)]
        while any(queues):
            ready = [number for number in range(WRITERS) if queues[number]]
            number = order.choice(ready) if shuffled else ready[0]
            writers[number].append([queues[number].pop(0)])
            if shuffled and order.random() < 0.5:
                index.sync(journals)
        index.sync(journals)
        states.append(_state(index))
        index.close()
        journals.close()
        for writer in writers:
            writer.close()
    assert states[0] == states[1]
