"""The index's file: damaged, gone, of another version, boot or owner, full, shared, forked. A miss at worst."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lmdb
import pytest
from blocks import NAMESPACE, delete, key, put, write

from deepinfer_kvstore import environment, follower, network_fs
from deepinfer_kvstore.environment import LOCK_BYTES
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.follower import Applied
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.index_files import INDEX_FORMAT
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.record import Record

BLOCKS = 50


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Journals with `BLOCKS` blocks."""
    (tmp_path / "journals").mkdir()
    write(tmp_path / "journals", map(put, range(BLOCKS))).close()
    return tmp_path / "journals"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index"


START = """
import os, sys, resource
from pathlib import Path
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal_set import JournalSet
path, namespace = Path(sys.argv[1]), bytes(range(32))
journals = JournalSet([Path(sys.argv[2])], namespace)
"""
SYNC = (
    START
    + """
index = Index.open(path, namespace, boot=lambda: {boot})
index.sync(journals)
{ending}
"""
)
SYNC_ON = (
    START
    + """
index = Index.open(path, namespace)
while True:
    index.sync(journals)
"""
)
FOLLOW = (
    START
    + """
last = b"\\0\\1" + (99 * 50).to_bytes(32, "big")
index = Index.open(path, namespace, map_bytes=1 << 18)
print(index.get(last) is None, flush=True)
sys.stdin.readline()
{use}
print(index._environment._lmdb.info()["map_size"] > 1 << 18 and index.get(last) is not None)
"""
)
FULL = (
    START
    + """
index = Index.open(path, namespace)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
index.sync(journals)
print(index.totals().keys)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
index.sync(journals)
print(index.totals().keys == 400 * 50)
"""
)
HANG = (
    START
    + """
index = Index.open(path, namespace)
with index._environment.read(b"keys"):
    os.kill(os.getpid(), 9)
"""
)


def process(script: str, path: Path, directory: Path, code: int = 0) -> str:
    """What `script` prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(directory)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def synced(path: Path, directory: Path, **options: object) -> Index:
    index = Index.open(path, NAMESPACE, **options)  # type: ignore[arg-type]
    index.sync(JournalSet([directory], NAMESPACE))
    return index


def present(index: Index, blocks: int = BLOCKS) -> int:
    return sum(index.contains([key(number) for number in range(blocks)]))


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [garbage, cut, zeros, Path.unlink])
def test_a_damaged_file_is_begun_anew_at_open(path: Path, directory: Path, damage: object) -> None:
    synced(path, directory).close()
    damage(path / "data.mdb")  # type: ignore[operator]
    index = Index.open(path, NAMESPACE)
    assert present(index) == 0
    assert index.sync(JournalSet([directory], NAMESPACE)).puts == BLOCKS
    assert present(index) == BLOCKS
    index.close()


def test_files_that_vanish_while_open_come_back(path: Path, directory: Path) -> None:
    """# Mooncake#935: where the metadata is lost, blocks are missing, not wrong."""
    index = synced(path, directory)
    for name in ("data.mdb", "lock.mdb", "identity.json"):
        (path / name).unlink()
    process(SYNC.format(boot="'x'", ending="index.close()"), path, directory)
    assert present(index) == BLOCKS
    assert index.sync(JournalSet([directory], NAMESPACE)) == Applied()  # the other process's file
    assert present(index) == BLOCKS
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert index.sync(JournalSet([directory], NAMESPACE)).puts == BLOCKS
    assert present(index) == BLOCKS
    index.close()


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
@pytest.mark.parametrize("is_open", [True, False])
def test_of_data_and_lock_one_is_not_used_without_the_other(
    path: Path, directory: Path, name: str, is_open: bool
) -> None:
    """Processes with one lock and two files of data undid each other's work for ever."""
    index = synced(path, directory)
    if not is_open:
        index.close()
    (path / name).unlink()
    if not is_open:
        index = Index.open(path, NAMESPACE)
    assert index.sync(JournalSet([directory], NAMESPACE)).puts == BLOCKS
    assert present(index) == BLOCKS
    assert (path / "data.mdb").exists() and (path / "lock.mdb").exists() and not index._environment.replaced()
    index.close()


def test_an_index_that_was_replaced_is_left_in_the_middle_of_a_backlog(
    path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "TRANSACTION_RECORDS", 10)
    index = Index.open(path, NAMESPACE)
    real = index._environment.write

    def write(change: Callable[[object], None]) -> None:
        real(change)
        (path / "data.mdb").unlink(missing_ok=True)

    with monkeypatch.context() as now:
        now.setattr(index._environment, "write", write)
        assert index.sync(JournalSet([directory], NAMESPACE)).puts == 10
    assert index.sync(JournalSet([directory], NAMESPACE)).puts == BLOCKS
    assert present(index) == BLOCKS
    index.close()


def test_damage_found_by_a_reader_is_a_miss_until_the_next_sync(path: Path, directory: Path) -> None:
    index = synced(path, directory)
    held = index._environment

    def spoil(transaction: object) -> None:
        transaction.put(key(1), b"no entry", db=held.databases[b"keys"])  # type: ignore[attr-defined]

    held.write(spoil)
    assert not index.needs_rebuild
    assert index.get_many([key(1), key(2)]) == [None, None]
    assert index.needs_rebuild
    journals = JournalSet([directory], NAMESPACE)
    assert index.sync(journals).puts == BLOCKS
    assert not index.needs_rebuild
    assert present(index) == BLOCKS
    index.close()


def test_what_was_read_before_the_index_was_begun_anew_is_read_again(
    path: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one holds nothing of what lies before it, and must not believe to be so far."""
    index, other = synced(path, directory), Index.open(path, NAMESPACE)
    journal = next(directory.iterdir())
    with journal.open("ab") as file:
        file.write(put(BLOCKS).pack())
    read = JournalSet.read

    def overtaken(journals: JournalSet, name: str, offset: int, limit: int) -> tuple[list[Record], int]:
        found = read(journals, name, offset, limit)
        monkeypatch.undo()
        other.begin_anew()
        other.sync(JournalSet([tmp_path / "none"], NAMESPACE))
        assert not present(index)
        return found

    monkeypatch.setattr(JournalSet, "read", overtaken)
    index.sync(JournalSet([directory], NAMESPACE))
    index.sync(JournalSet([directory], NAMESPACE))
    assert present(index, BLOCKS + 1) == BLOCKS + 1
    index.close()
    other.close()


def test_an_index_that_contradicts_itself_is_begun_anew(path: Path, directory: Path) -> None:
    index = synced(path, directory)
    held = index._environment
    held.write(lambda transaction: transaction.delete(key(1), db=held.databases[b"keys"]))
    write(directory, [delete(put(1))], writer=2).close()
    journals = JournalSet([directory], NAMESPACE)
    index.sync(journals)
    index.sync(journals)
    assert present(index) == BLOCKS - 1
    assert index.totals().keys == BLOCKS - 1
    index.close()


def sign(path: Path, version: object) -> None:
    identity = json.loads((path / "identity.json").read_text())
    (path / "identity.json").write_text(json.dumps({**identity, "format": version}))


@pytest.mark.parametrize("version", [INDEX_FORMAT - 1, "x", None])
def test_an_index_of_an_older_format_is_begun_anew(path: Path, directory: Path, version: object) -> None:
    synced(path, directory).close()
    sign(path, version)
    index = Index.open(path, NAMESPACE)
    assert present(index) == 0
    index.close()


def test_an_index_of_a_newer_version_is_left_to_it(path: Path, directory: Path) -> None:
    """Or two versions on one node would throw away each other's index for ever."""
    synced(path, directory).close()
    sign(path, INDEX_FORMAT + 1)
    with pytest.raises(StoreConfigError, match="is of format 2, this version writes 1: set index_dir to another"):
        Index.open(path, NAMESPACE)
    sign(path, INDEX_FORMAT)
    index = synced(path, directory)
    sign(path, INDEX_FORMAT + 1)
    shutil.copy(path / "data.mdb", path / "new")
    (path / "new").rename(path / "data.mdb")
    assert index.sync(JournalSet([directory], NAMESPACE)) == Applied()
    assert present(index) == 0
    sign(path, INDEX_FORMAT)
    index.sync(JournalSet([directory], NAMESPACE))
    assert present(index) == BLOCKS
    index.close()


@pytest.mark.parametrize(("ending", "expected"), [("index.close()", BLOCKS), ("os._exit(0)", 0)])
def test_after_a_restart_of_the_system_only_a_flushed_index_is_trusted(
    path: Path, directory: Path, ending: str, expected: int
) -> None:
    synced(path, directory, boot=lambda: "first").close()
    write(directory, [put(BLOCKS)], epoch=2).close()
    process(SYNC.format(boot="'first'", ending=ending), path, directory)
    index = Index.open(path, NAMESPACE, boot=lambda: "second")
    assert present(index) == expected
    index.sync(JournalSet([directory], NAMESPACE))
    assert present(index, BLOCKS + 1) == BLOCKS + 1
    index.close()


def test_a_crash_of_a_process_costs_nothing(path: Path, directory: Path) -> None:
    process(SYNC.format(boot="'first'", ending="os.kill(os.getpid(), 9)"), path, directory, code=-signal.SIGKILL)
    index = Index.open(path, NAMESPACE, boot=lambda: "first")
    assert present(index) == BLOCKS
    index.close()


def test_a_system_without_boot_ids_trusts_what_was_flushed_only(path: Path, directory: Path) -> None:
    process(SYNC.format(boot="''", ending="os._exit(0)"), path, directory)
    index = synced(path, directory, boot=lambda: "")
    assert present(index) == BLOCKS
    index.close()
    index = Index.open(path, NAMESPACE, boot=lambda: "")
    assert present(index) == BLOCKS
    index.close()


def test_an_index_of_another_root_is_refused(path: Path, directory: Path) -> None:
    synced(path, directory, root="/mnt/a").close()
    with pytest.raises(StoreConfigError, match="belongs to .*/mnt/a.*remove it or set index_dir to another"):
        Index.open(path, NAMESPACE, root="/mnt/b")
    with pytest.raises(StoreConfigError, match="belongs to"):
        Index.open(path, bytes(32), root="/mnt/a")


def test_an_open_index_whose_directory_became_another_roots_has_misses(path: Path, directory: Path) -> None:
    index = synced(path, directory, root="/mnt/a")
    path.rename(path.with_name("old"))
    other = path.with_name("other")
    synced(other, directory, root="/mnt/b").close()
    other.rename(path)
    assert index.sync(JournalSet([directory], NAMESPACE)) == Applied()
    assert present(index) == 0
    for file in path.iterdir():
        file.unlink()
    assert index.sync(JournalSet([directory], NAMESPACE)).puts == BLOCKS
    assert present(index) == BLOCKS
    index.close()


def test_a_want_of_memory_or_files_at_open_discards_nothing(
    path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced(path, directory).close()
    with monkeypatch.context() as context:
        context.setattr(
            lmdb, "open", lambda *_, **__: (_ for _ in ()).throw(lmdb.MemoryError("Cannot allocate memory"))
        )
        with pytest.raises(StoreConfigError, match="Cannot allocate memory: set index_dir"):
            Index.open(path, NAMESPACE)
    index = Index.open(path, NAMESPACE)
    assert present(index) == BLOCKS
    index.close()


def test_a_directory_that_cannot_be_made_is_one_line_at_open(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreConfigError, match="Not a directory: set index_dir to a writable directory"):
        Index.open(tmp_path / "file" / "index", NAMESPACE)


def test_a_directory_without_permission_is_one_line_at_open(tmp_path: Path) -> None:
    with pytest.raises(StoreConfigError, match="set index_dir to a writable directory"):
        Index.open(Path("/proc/index"), NAMESPACE)


def test_a_full_disk_is_one_line_at_open_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB maps its lock file sparse: on a full disk the kernel kills who first writes to a page of it."""
    index = Index.open(tmp_path / "index", NAMESPACE)
    lock = (tmp_path / "index" / "lock.mdb").stat()
    assert lock.st_size == LOCK_BYTES <= lock.st_blocks * 512
    index.close()
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[: len(data) // 2]))
    with pytest.raises(StoreConfigError, match="No space left on device: set index_dir"):
        Index.open(tmp_path / "other", NAMESPACE)
    assert not (tmp_path / "other" / "lock.mdb").exists()
    monkeypatch.undo()
    Index.open(tmp_path / "other", NAMESPACE).close()


def test_a_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_fs, "file_system_type", lambda *_: "nfs4")
    with pytest.raises(StoreConfigError, match=r"network file system \(nfs4\).*set index_dir to a local disk"):
        Index.open(path, NAMESPACE)
    assert not path.exists()


@pytest.mark.parametrize("use", ["index.get(last)", "index.sync(journals)"])
def test_a_full_map_grows_under_readers(path: Path, directory: Path, use: str) -> None:
    """Another process that has the smaller map follows, whatever it does next."""
    small = 1 << 18
    index = synced(path, directory, map_bytes=small)
    stop = threading.Event()
    wrong: list[int] = []

    def read() -> None:
        while not stop.wait(0.001):
            if present(index) != BLOCKS:
                wrong.append(present(index))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    with subprocess.Popen(
        [sys.executable, "-c", FOLLOW.format(use=use), str(path), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == "True\n"
        write(directory, [put(number) for number in range(BLOCKS, 20 * BLOCKS)], epoch=2).close()
        write(directory, [put(number) for number in range(20 * BLOCKS, 100 * BLOCKS)], epoch=3).close()
        assert index.sync(JournalSet([directory], NAMESPACE)).puts == 99 * BLOCKS
        assert (path / "data.mdb").stat().st_size > small
        assert other.communicate("\n", timeout=30)[0] == "True\n"
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert present(index, 100 * BLOCKS) == 100 * BLOCKS
    index.close()


def test_a_long_backlog_is_folded_in_bounded_transactions(
    path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """# llm-d-kv-cache#457, #616: no queue grows with what others write."""
    monkeypatch.setattr(follower, "TRANSACTION_RECORDS", 64)
    write(directory, map(put, range(BLOCKS, 1000)), epoch=2).close()
    write(directory, [put(number, writer=2) for number in range(1000, 1500)], writer=2).close()
    index = Index.open(path, NAMESPACE)
    held, sizes = index._environment, []
    real = held.write

    def counted(change: Callable[[object], None]) -> None:
        before = index.totals().keys
        real(change)
        sizes.append(index.totals().keys - before)

    monkeypatch.setattr(held, "write", counted)
    assert index.sync(JournalSet([directory], NAMESPACE)).puts == 1500
    assert max(sizes) == 64 and sum(sizes) == 1500
    index.close()


def test_a_full_disk_leaves_misses_and_is_caught_up_with(path: Path, directory: Path) -> None:
    write(directory, [put(number) for number in range(BLOCKS, 400 * BLOCKS)], epoch=2).close()
    out = process(FULL, path, directory)
    assert out.split() == ["0", "True"]


def test_processes_that_sync_at_once_and_die_leave_one_index(path: Path, directory: Path) -> None:
    """kill -9 at any moment of a sync; who lives goes on."""
    writer = JournalWriter([directory], 2, 1, NAMESPACE)
    chance = random.Random(1)
    written = BLOCKS
    for _ in range(6):
        others = [subprocess.Popen([sys.executable, "-c", SYNC_ON, str(path), str(directory)]) for _ in range(2)]
        for _ in range(20):
            writer.append([put(number, writer=2) for number in range(written, written + 100)])
            written += 100
            time.sleep(chance.random() * 0.03)
        for other in others:
            other.kill()
            other.wait()
    index = synced(path, directory)
    assert present(index, written) == written
    assert index.totals()[:3] == (written, 100 * written, written)
    index.close()


def test_killed_readers_do_not_keep_others_out(path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "READERS", 4)
    index = synced(path, directory)
    for _ in range(6):
        process(HANG, path, directory, code=-signal.SIGKILL)
    assert present(index) == BLOCKS
    index.close()


def test_one_process_shares_one_environment(path: Path, directory: Path) -> None:
    first, second = synced(path, directory), Index.open(path, NAMESPACE)
    assert present(second) == BLOCKS
    first.close()
    first.close()
    assert present(second) == BLOCKS
    second.close()
    assert (path / "clean").exists()
    assert present(second) == 0
    third = synced(path, directory)
    assert present(third) == BLOCKS
    third.close()


def test_a_closed_index_stays_closed(path: Path, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A thread that comes late finds nothing, and above all throws away nothing that others use."""
    index = synced(path, directory)
    index.close()
    assert present(index) == 0
    assert index.sync(JournalSet([directory], NAMESPACE)) == Applied()
    assert not index.needs_rebuild and not caplog.records
    again = Index.open(path, NAMESPACE)
    assert present(again) == BLOCKS
    again.close()


def test_a_forked_child_has_misses_and_may_not_open(path: Path, directory: Path) -> None:
    index = synced(path, directory)
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            none = present(index) == 0 and index.sync(JournalSet([directory], NAMESPACE)) == Applied()
            try:
                Index.open(path, NAMESPACE)
            except StoreConfigError as error:
                code = 0 if none and "fork" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert present(index) == BLOCKS
    write(directory, [put(BLOCKS)], epoch=2).close()
    assert index.sync(JournalSet([directory], NAMESPACE)).puts == 1
    index.close()
