"""Compaction: the journals become short, and the index that is made from them stays the same."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import NAMESPACE, delete, key, put, touch, write
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_kvstore import compaction
from deepinfer_kvstore.compaction import Compacted, Compactor
from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.record import Record


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "journals").mkdir()
    return tmp_path / "journals"


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index.open(tmp_path / "index", NAMESPACE)


def fresh(directory: Path) -> list[tuple[Key, Entry]]:
    """What a node finds that reads the journals for the first time."""
    node = Index.open(directory.parent / f"node-{os.urandom(4).hex()}", NAMESPACE)
    journals = JournalSet([directory], NAMESPACE)
    node.sync(journals)
    journals.close()
    found = node.entries()
    node.close()
    return found


def test_what_no_longer_counts_is_dropped(directory: Path, index: Index) -> None:
    first, second, third = put(1), put(2), put(3, slot=1, generation=2)
    uses = [touch(second, 2000 + number) for number in range(50)]
    journal = write(directory, [first, delete(first), second, *uses, third])
    before = fresh(directory)
    index.sync(JournalSet([directory], NAMESPACE))
    assert Compactor(journal, index).compact() == Compacted(files=1, read=54, kept=3)
    assert [path.name for path in directory.iterdir()] == ["00000001.00000001-0001.log"]
    assert fresh(directory) == before
    journal.append([put(4)])
    assert [found for found, _ in fresh(directory)] == [key(2), key(3), key(4)]


def test_a_reader_in_the_middle_of_a_closed_file_misses_nothing(directory: Path, index: Index) -> None:
    journal = write(directory, [put(number) for number in range(4)])
    journals = JournalSet([directory], NAMESPACE)
    slow = Index.open(directory.parent / "slow", NAMESPACE)
    slow.sync(journals)
    journal.append([put(4), delete(put(0))])
    index.sync(JournalSet([directory], NAMESPACE))
    Compactor(journal, index).compact()
    slow.sync(journals)
    assert slow.entries() == index.entries() == fresh(directory)


def test_an_index_that_is_behind_drops_nothing_that_counts(directory: Path, index: Index) -> None:
    journal = write(directory, [put(1), put(2), delete(put(2))])
    before = fresh(directory)
    assert Compactor(journal, index).compact().kept == 3
    assert fresh(directory) == before


def test_a_use_that_the_index_has_not_heard_of_is_kept(directory: Path, index: Index) -> None:
    journal = write(directory, [put(1)])
    index.sync(JournalSet([directory], NAMESPACE))
    journal.append([touch(put(1), 1, ttl=3)])
    Compactor(journal, index).compact()
    ((_, entry),) = fresh(directory)
    assert (entry.touched_ms, entry.ttl_class) == (put(1).entry.touched_ms, 3)


def test_only_own_and_named_dead_journals_are_taken(directory: Path, index: Index) -> None:
    write(directory, [put(1, writer=1)], writer=1, epoch=1)
    alive = write(directory, [put(2, writer=2)], writer=2)
    write(directory, [put(3, writer=3)], writer=3)
    journal = write(directory, [put(4, writer=1)], writer=1, epoch=2)
    before = fresh(directory)
    index.sync(JournalSet([directory], NAMESPACE))
    assert Compactor(journal, index).compact(dead=[3]).files == 3
    assert sorted(path.name for path in directory.iterdir()) == ["00000001.00000002-0001.log", str(alive.name)]
    assert fresh(directory) == before


def test_a_journal_that_cannot_be_written_loses_nothing(
    directory: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = write(directory, [put(1), put(2)])
    before = fresh(directory)

    def full(file: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            Compactor(journal, index).compact()
    assert fresh(directory) == before
    assert journal.append([put(3)]) == 1


def test_a_file_of_another_namespace_is_left_alone(directory: Path, index: Index) -> None:
    JournalWriter([directory], 1, 1, bytes(32)).append([put(1)])
    journal = write(directory, [put(2)], epoch=2)
    Compactor(journal, index).compact()
    assert "00000001.00000001.log" in [path.name for path in directory.iterdir()]


def test_it_is_worthwhile_once_the_journals_have_doubled(
    directory: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "MIN_RECORDS", 10)
    journal = write(directory, [put(number) for number in range(9)])
    compactor = Compactor(journal, index)
    assert not compactor.worthwhile()
    journal.append([put(9)])
    assert compactor.worthwhile()
    compactor.compact()
    assert not compactor.worthwhile()


LIVES = [
    put(1, slot=0, created=20),
    put(2, slot=0, generation=2),
    put(1, slot=1, writer=2),
    put(3, slot=1, writer=2, generation=3),
]
RECORDS = st.sampled_from(LIVES).flatmap(
    lambda life: st.one_of(
        st.just(life), st.just(delete(life)), st.builds(touch, st.just(life), st.integers(1, 9), st.integers(0, 2))
    )
)
STEPS = st.lists(
    st.one_of(st.tuples(st.sampled_from([1, 2]), RECORDS), st.sampled_from(["compact 1", "compact 2", "sync", "lose"]))
)


@settings(max_examples=60)
@given(steps=STEPS)
def test_compaction_at_any_moment_changes_no_index_and_an_index_may_be_lost(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, Record] | str]
) -> None:
    parent = tmp_path_factory.mktemp("node")
    plain, compacted = parent / "plain", parent / "compacted"
    journals: dict[tuple[Path, int], JournalWriter] = {}
    for directory in (plain, compacted):
        directory.mkdir()
        journals |= {(directory, writer): write(directory, [], writer=writer) for writer in (1, 2)}
    tailed = JournalSet([compacted], NAMESPACE)
    index = Index.open(parent / "index", NAMESPACE)
    for step in steps:
        if step == "sync":
            index.sync(tailed)
        elif step == "lose":
            index.begin_anew()
        elif isinstance(step, str):
            Compactor(journals[compacted, int(step[-1])], index).compact()
        else:
            writer, record = step
            journals[plain, writer].append([record])
            journals[compacted, writer].append([record])
    index.sync(tailed)
    expected = fresh(plain)
    assert index.entries() == expected
    assert fresh(compacted) == expected
    index.close()
    tailed.close()
    for journal in journals.values():
        journal.close()


def test_a_writer_that_was_taken_over_removes_nothing(directory: Path, index: Index) -> None:
    journal = write(directory, [put(1)])
    with pytest.raises(OSError, match="another process has the writer's identity"):
        Compactor(journal, index, held=lambda: False).compact()
    assert [found for found, _ in fresh(directory)] == [key(1)]


def test_a_journal_that_another_took_meanwhile_ends_the_compaction(
    directory: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = write(directory, [put(1)], epoch=1), write(directory, [put(2)], epoch=2)
    real = compaction.scan

    def late(directories: list[Path], name: str) -> Iterator[list[Record]]:
        (directory / str(first.name)).unlink(missing_ok=True)
        yield from real(directories, name)

    monkeypatch.setattr(compaction, "scan", late)
    with pytest.raises(FileNotFoundError, match="journal is gone"):
        Compactor(second, index).compact()
    assert [found for found, _ in fresh(directory)] == [key(2)]


def test_journals_are_kept_short_on_a_thread(directory: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(compaction, "monotonic", lambda: now[0])
    monkeypatch.setattr(compaction, "MIN_RECORDS", 10)
    record = put(1)
    journal = write(directory, [record, *(touch(record, number) for number in range(2000, 2100))])
    index.sync(JournalSet([directory], NAMESPACE))
    compactor = Compactor(journal, index)
    compactor.keep_short()
    assert compactor.wait(10)
    assert journal.records == 101
    now[0] += compaction.PAUSE_SECONDS
    compactor.keep_short()
    assert compactor.wait(10)
    assert journal.records == 2
    assert len(os.listdir(directory)) == 1
