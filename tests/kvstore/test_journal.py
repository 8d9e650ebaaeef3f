"""Journals as others see them: torn, damaged, shortened, replaced, foreign, gone."""

import errno
import os
from itertools import count
from pathlib import Path

import pytest
from blocks import NAMESPACE, put, write

from deepinfer_kvstore import journal_set
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.journal_set import JournalSet, scan
from deepinfer_kvstore.record import RECORD_BYTES, JournalName, Op, Record, unpack_record


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "journals").mkdir()
    return tmp_path / "journals"


@pytest.fixture
def journals(directory: Path) -> JournalSet:
    return JournalSet([directory], NAMESPACE)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that journal sets see; the test moves it."""
    now = [1000.0]
    monkeypatch.setattr(journal_set, "monotonic", lambda: now[0])
    return now


def read_all(journals: JournalSet, name: str, offset: int = RECORD_BYTES, limit: int = 100) -> tuple[list[Record], int]:
    assert name in journals.names()
    return journals.read(name, offset, limit)


@pytest.mark.parametrize("op", Op)
def test_a_record_is_96_bytes_and_comes_back(op: Op) -> None:
    record = put(7, slot=3, writer=0xFFFFFFFF, generation=1 << 63, ttl=255, tenant=9)._replace(op=op)
    assert len(record.pack()) == RECORD_BYTES == 96
    assert unpack_record(record.pack()) == record


def test_no_flipped_bit_of_a_record_goes_unseen() -> None:
    packed = put(7).pack()
    for bit in range(8 * RECORD_BYTES):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unpack_record(bytes(damaged)) is None


def test_an_operation_of_a_later_version_is_no_record() -> None:
    record = put(7)
    assert unpack_record(record._replace(op=77).pack()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [JournalName(1, 2, 0), JournalName(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFF), JournalName(1, 2, 0x10000)]
)
def test_names_come_back(name: JournalName) -> None:
    assert JournalName.parse(str(name)) == name


@pytest.mark.parametrize(
    "name", ["", "1.2.log", "00000001.00000002.log~", "00000001.00000002.log.tmp", "0000000g.00000002.log"]
)
def test_other_names_are_no_journals(name: str) -> None:
    assert JournalName.parse(name) is None


def test_parts_beyond_four_digits_are_found(directory: Path, journals: JournalSet) -> None:
    """A writer that compacts each minute has as many after 45 days."""
    writer = JournalWriter([directory], 1, 1, NAMESPACE, part=0xFFFF)
    writer.rotate()
    writer.append([put(1)])
    assert journals.names() == ["00000001.00000001-10000.log", "00000001.00000001-ffff.log"]
    assert read_all(journals, str(writer.name))[0] == [put(1)]


def test_an_epoch_has_one_journal(directory: Path) -> None:
    write(directory, [])
    with pytest.raises(FileExistsError):
        write(directory, [])


def test_a_journal_without_records_is_gone_when_closed(directory: Path) -> None:
    write(directory, []).close()
    write(directory, [put(1)], epoch=2).close()
    assert [path.name for path in directory.iterdir()] == ["00000001.00000002.log"]


def test_reading_goes_on_where_it_ended(directory: Path, journals: JournalSet) -> None:
    writer = write(directory, [put(number) for number in range(5)])
    name = str(writer.name)
    first, offset = read_all(journals, name, limit=3)
    second, offset = journals.read(name, offset, 3)
    assert first + second == [put(number) for number in range(5)]
    assert journals.read(name, offset, 3) == ([], offset)
    writer.append([put(5)])
    assert journals.read(name, offset, 3) == ([put(5)], offset + RECORD_BYTES)


def test_a_torn_tail_waits_and_is_read_once_completed(
    directory: Path, journals: JournalSet, clock: list[float]
) -> None:
    path = directory / str(write(directory, [put(1)]).name)
    packed = put(2).pack()
    for cut in (1, 50, 95):
        with path.open("r+b") as file:
            file.seek(2 * RECORD_BYTES)
            file.write(packed[:cut])
        clock[0] += 100
        assert read_all(journals, path.name) == ([put(1)], 2 * RECORD_BYTES)
        assert journals.read(path.name, 2 * RECORD_BYTES, 9) == ([], 2 * RECORD_BYTES)
    with path.open("r+b") as file:
        file.seek(2 * RECORD_BYTES)
        file.write(packed)
    assert journals.read(path.name, 2 * RECORD_BYTES, 9) == ([put(2)], 3 * RECORD_BYTES)


def test_a_page_that_comes_late_is_waited_for(directory: Path, journals: JournalSet, clock: list[float]) -> None:
    path = directory / str(write(directory, [put(1), put(2)]).name)
    whole = path.read_bytes()
    path.write_bytes(whole[:RECORD_BYTES] + bytes(RECORD_BYTES) + whole[2 * RECORD_BYTES :])
    assert read_all(journals, path.name) == ([], RECORD_BYTES)
    clock[0] += 1
    assert journals.read(path.name, RECORD_BYTES, 9) == ([], RECORD_BYTES)
    path.write_bytes(whole)
    assert journals.read(path.name, RECORD_BYTES, 9) == ([put(1), put(2)], 3 * RECORD_BYTES)


@pytest.mark.parametrize("limit", [2, 3, 100])
def test_damage_in_the_middle_is_passed_over(
    directory: Path, journals: JournalSet, clock: list[float], limit: int
) -> None:
    path = directory / str(write(directory, [put(number) for number in range(6)]).name)
    with path.open("r+b") as file:
        file.seek(2 * RECORD_BYTES + 5)
        file.write(os.urandom(3 * RECORD_BYTES))
    found, offset = [], RECORD_BYTES
    journals.names()
    for _ in range(12):
        records, offset = journals.read(path.name, offset, limit)
        found += records
        clock[0] += 3
    assert found == [put(0), put(5)]
    assert offset == 7 * RECORD_BYTES
    assert [record for records in scan([directory], path.name) for record in records] == [put(0), put(5)]


def test_a_failed_write_is_overwritten_by_the_next(
    directory: Path, journals: JournalSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write(directory, [put(1)])
    real = os.pwrite

    def short(file: int, data: bytes, offset: int) -> int:
        if offset % RECORD_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[: RECORD_BYTES + 40], offset)

    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", short)
        assert writer.append([put(2), put(3), put(4)]) == 1
    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", lambda *_: short(0, b"", 1))
        with pytest.raises(OSError, match="No space"):
            writer.append([put(5)])
    writer.append([put(6)])
    assert read_all(journals, str(writer.name))[0] == [put(1), put(2), put(6)]


def test_a_file_that_became_shorter_is_read_again(directory: Path, journals: JournalSet, clock: list[float]) -> None:
    path = directory / str(write(directory, [put(1), put(2), put(3)]).name)
    _, offset = read_all(journals, path.name)
    os.truncate(path, 2 * RECORD_BYTES)
    assert journals.read(path.name, offset, 9) == ([], offset)
    clock[0] += 3
    assert journals.read(path.name, offset, 9) == ([], RECORD_BYTES)
    assert journals.read(path.name, RECORD_BYTES, 9) == ([put(1)], 2 * RECORD_BYTES)


def test_a_file_that_was_replaced_has_another_identity(directory: Path, journals: JournalSet) -> None:
    path = directory / str(write(directory, [put(1)]).name)
    journals.names()
    before = journals.identity(path.name)
    path.unlink()
    write(directory, [put(2)])
    journals.names()
    assert journals.identity(path.name) not in (before, None)
    assert journals.read(path.name, RECORD_BYTES, 9)[0] == [put(2)]


@pytest.mark.parametrize("header", [b"", bytes(50), bytes(96), os.urandom(96)])
def test_a_file_without_our_header_is_not_read(directory: Path, journals: JournalSet, header: bytes) -> None:
    (directory / "00000001.00000001.log").write_bytes(header + put(1).pack())
    assert journals.names() == []


def test_journals_of_another_namespace_are_foreign(directory: Path, journals: JournalSet) -> None:
    name = str(JournalWriter([directory], 1, 1, bytes(32)).name)
    assert journals.names() == []
    assert journals.foreign == {name}


def test_a_header_that_comes_late_makes_it_a_journal(directory: Path, journals: JournalSet, clock: list[float]) -> None:
    path = directory / str(write(directory, [put(1)]).name)
    whole = path.read_bytes()
    for early in (b"", bytes(40), bytes(len(whole))):
        path.write_bytes(early)
        assert journals.names() == []
        clock[0] += 10
    path.write_bytes(whole)
    clock[0] += 10
    assert journals.names() == [path.name]


def test_journals_that_vanish_are_no_longer_named(directory: Path, journals: JournalSet, clock: list[float]) -> None:
    path = directory / str(write(directory, [put(1)]).name)
    assert journals.names() == [path.name]
    path.unlink()
    assert journals.names() == []
    assert journals.read(path.name, RECORD_BYTES, 9) == ([], RECORD_BYTES)


def test_a_directory_out_of_reach_takes_nothing_away(directory: Path, journals: JournalSet, clock: list[float]) -> None:
    """An unmounted root must not make the index begin anew when it is back."""
    name = str(write(directory, [put(1)]).name)
    journals.names()
    before = journals.identity(name)
    directory.rename(directory.with_name("away"))
    clock[0] += 10
    assert journals.names() == [name]
    directory.with_name("away").rename(directory)
    clock[0] += 10
    assert journals.names() == [name] and journals.identity(name) == before


def test_no_directory_is_no_journals(tmp_path: Path) -> None:
    assert JournalSet([tmp_path / "none"], NAMESPACE).names() == []


def test_the_directory_is_listed_only_when_it_changes(
    directory: Path, journals: JournalSet, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, [])
    journals.names()
    clock[0] += 3  # past the grain of its time stamp
    journals.names()
    clock[0] += 1
    listings = count()
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (next(listings), real(path))[1])
    for _ in range(5):
        journals.names()
    assert next(listings) == 0
    write(directory, [], writer=2)
    assert len(journals.names()) == 2
    assert next(listings) == 2


def test_more_journals_than_open_files_are_read(
    directory: Path, journals: JournalSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_set, "OPEN_FILES", 2)
    for writer in range(5):
        write(directory, [put(writer, writer=writer)], writer=writer).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        found = [journals.read(name, RECORD_BYTES, 9)[0] for name in journals.names()]
        assert found == [[put(writer, writer=writer)] for writer in range(5)]
        assert len(os.listdir("/proc/self/fd")) == before + 2
    journals.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def replicas(tmp_path: Path) -> list[Path]:
    directories = [tmp_path / name for name in ("a", "b", "c")]
    for directory in directories:
        directory.mkdir()
    return directories


def test_replicas_make_up_for_each_other(replicas: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter(replicas, 1, 1, NAMESPACE)
    writer.append([put(1)])
    real = os.pwrite
    failing = iter([False, True, True] + [True, False, True])

    def sometimes(file: int, data: bytes, offset: int) -> int:
        if next(failing):
            raise OSError(errno.EIO, "Input/output error")
        return real(file, data, offset)

    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", sometimes)
        assert writer.append([put(2)]) == 1
        assert writer.append([put(3)]) == 1
    writer.append([put(4)])
    journals = JournalSet(replicas, NAMESPACE)
    found, offset = [], RECORD_BYTES
    for _ in range(4):
        records, offset = read_all(journals, str(writer.name), offset)
        found += records
    assert found == [put(1), put(2), put(3), put(4)]
    assert [record for records in scan(replicas, str(writer.name)) for record in records] == found


def test_a_replica_that_is_behind_is_no_file_that_became_shorter(replicas: list[Path], clock: list[float]) -> None:
    writer = JournalWriter(replicas, 1, 1, NAMESPACE)
    writer.append([put(1), put(2)])
    os.truncate(replicas[0] / str(writer.name), 2 * RECORD_BYTES)
    journals = JournalSet(replicas, NAMESPACE)
    _, end = read_all(journals, str(writer.name))
    assert end == 3 * RECORD_BYTES
    for _ in range(3):
        assert journals.read(str(writer.name), end, 9) == ([], end)
        clock[0] += 10


def test_a_short_file_that_recovers_is_no_longer_suspected(
    directory: Path, journals: JournalSet, clock: list[float]
) -> None:
    path = directory / str(write(directory, [put(1), put(2)]).name)
    whole = path.read_bytes()
    _, end = read_all(journals, path.name)
    for _ in range(3):
        os.truncate(path, RECORD_BYTES)
        assert journals.read(path.name, end, 9) == ([], end)
        clock[0] += 10
        path.write_bytes(whole)
        assert journals.read(path.name, end, 9) == ([], end)


def test_a_want_of_file_numbers_passes(
    directory: Path, journals: JournalSet, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / str(write(directory, [put(1)]).name)
    journals.names()
    journals.close()

    def none(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as context:
        context.setattr(os, "open", none)
        assert journals.read(path.name, RECORD_BYTES, 9) == ([], RECORD_BYTES)
    assert journals.read(path.name, RECORD_BYTES, 9)[0] == [put(1)]


def test_one_replica_is_enough(replicas: list[Path]) -> None:
    replicas[0].rmdir()
    writer = JournalWriter(replicas, 1, 1, NAMESPACE)
    writer.append([put(1)])
    (replicas[1] / str(writer.name)).unlink()
    assert read_all(JournalSet(replicas, NAMESPACE), str(writer.name))[0] == [put(1)]


def test_no_replica_is_an_error_and_leaves_nothing(replicas: list[Path]) -> None:
    for directory in replicas:
        directory.rmdir()
    with pytest.raises(FileNotFoundError):
        JournalWriter(replicas, 1, 1, NAMESPACE)


def test_an_epoch_taken_in_one_replica_is_taken(replicas: list[Path]) -> None:
    (replicas[1] / "00000001.00000001.log").touch()
    with pytest.raises(FileExistsError):
        JournalWriter(replicas, 1, 1, NAMESPACE)
    assert list(replicas[0].iterdir()) == []
