"""Operators' commands on stores that real engines' code has written."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from deepinfer_kvstore import ownership
from deepinfer_kvstore.entry import Entry, Location, wall_ms
from deepinfer_kvstore.header import HEADER_BYTES, Seal
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.record import Record
from deepinfer_kvstore.slabs import slab_name
from deepinfer_kvstore.store import Put, Store
from deepinfer_kvstore.tenants import tenant_tag
from deepinfer_vllm.cli import main
from store_case import PAYLOAD, SLAB_SLOTS, SLOT, descriptor, get, key, open_store, payload

BLOCKS = 20
NAMESPACE = descriptor().directory
HOUR_MS = 3_600_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a closed store: 20 blocks in two slabs, 12 of tenant a and 8 of tenant b, written an hour ago."""
    store = open_store(tmp_path, clock_ms=lambda: wall_ms() - HOUR_MS)
    fill(store, range(12), "a")
    fill(store, range(12, BLOCKS), "b")
    store.close()
    return tmp_path / "root"


def fill(store: Store, numbers: range, tenant: str = "") -> None:
    """Store blocks that each begin a sequence."""
    puts = [Put(key(n), memoryview(payload(n)), bytes(8), 64) for n in numbers]
    transfer = store.put(puts, tenant=tenant)
    assert transfer.wait(30) and all(transfer.results())


def use(store: Store, number: int) -> None:
    """Touch a block, and wait until that is written down."""
    store.touch([key(number)])
    deadline = monotonic() + 30
    while (found := store.index.get(key(number))) is None or found.touched_ms == found.created_ms:
        assert monotonic() < deadline
        sleep(0.005)
        assert store.sync(60)


def run(root: Path, command: str, *arguments: str, code: int = 0) -> None:
    index_dir = root.parent / "index"
    assert main.run(["kvstore", command, "--root", str(root), "--index-dir", str(index_dir), *arguments]) == code


def report(root: Path, capsys: pytest.CaptureFixture[str], command: str, *arguments: str, code: int = 0) -> Any:
    """What a command prints of the one namespace."""
    capsys.readouterr()
    run(root, command, "--json", *arguments, code=code)
    (found,) = json.loads(capsys.readouterr().out)
    assert found["namespace"] == NAMESPACE and found["model"] == "m"
    return found


def text(root: Path, capsys: pytest.CaptureFixture[str], command: str, *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    run(root, command, *arguments, code=code)
    return capsys.readouterr().out


def entry_of(root: Path, number: int) -> Entry:
    index = Index.open(root.parent / "index" / NAMESPACE, descriptor().digest(), root=str(root))
    index.sync(JournalSet([root / NAMESPACE / "journals"], descriptor().digest()))
    found = index.get(key(number))
    index.close()
    assert found is not None
    return found


def slab_of(root: Path, location: Location) -> Path:
    return root / NAMESPACE / "slabs" / slab_name(location.writer, location.slab)


def flip(root: Path, number: int, at: int) -> Location:
    """Flip a bit of block `number`, `at` bytes into its slot."""
    location = entry_of(root, number).location
    with slab_of(root, location).open("r+b") as file:
        file.seek(location.slot * SLOT + at)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return location


def present(root: Path) -> list[int]:
    """The blocks that a node which has never seen this store gets, whole."""
    store = open_store(root.parent, index_dir=root.parent / f"node-{os.urandom(4).hex()}", read_only=True)
    found = [number for number, block in enumerate(get(store, range(BLOCKS))) if block == payload(number)]
    store.close()
    return found


def test_a_sound_store_is_sound(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = report(root, capsys, "check", "--sample", "5")
    assert few["damaged"] == {} and 1 <= few["intact"] == few["slots_read"] <= 5
    for arguments in ((), ("--all",)):
        found = report(root, capsys, "check", *arguments)
        assert found["damaged"] == {} and found["damaged_blocks"] == []
        assert found["intact"] == BLOCKS
    assert found["orphans"] == 0 and found["slots_read"] == 2 * SLAB_SLOTS
    (writer,) = found["writers"]
    assert writer["alive"] is False and writer["pid"] == os.getpid()
    assert "20 blocks whole, 0 damaged, 0 orphans; 0 writers alive, 1 dead" in text(root, capsys, "check", "--all")


def test_an_open_store_has_a_live_writer(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(root.parent)
    assert report(root, capsys, "check")["writers"][0]["alive"] is True
    assert report(root, capsys, "stats")["writers_alive"] == 1
    store.close()


@pytest.mark.parametrize("arguments", [(), ("--all",)])
def test_check_finds_damage_and_says_where(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    checksum, header = flip(root, 3, 100), flip(root, 5, SLOT - HEADER_BYTES + 50)
    found = report(root, capsys, "check", *arguments, code=1)
    assert found["damaged"] == {"checksum": 1, "header": 1}
    assert {block["why"]: (block["slab"], block["slot"]) for block in found["damaged_blocks"]} == {
        "checksum": (checksum.slab, checksum.slot),
        "header": (header.slab, header.slot),
    }
    assert f"damaged: {key(3).hex()}" in text(root, capsys, "check", "--all", code=1)


def test_check_finds_blocks_whose_slab_is_gone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = entry_of(root, 0).location
    slab_of(root, gone).unlink()
    assert report(root, capsys, "check", "--all", code=1)["damaged"] == {"no_slab": SLAB_SLOTS}
    assert report(root, capsys, "check", code=1)["damaged"] == {"no_slab": SLAB_SLOTS}


def test_check_finds_blocks_of_zeros(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """# local-inference-lab/vllm#217: a second mapping of the region stored zeros."""
    store = open_store(tmp_path)
    store.put([Put(key(1), memoryview(bytes(PAYLOAD)), bytes(8), 64)]).wait(30)
    store.close()
    assert report(tmp_path / "root", capsys, "check", code=1)["damaged"] == {"zeros": 1}


def test_repair_deletes_what_is_not_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(root, 3, 100)
    last = entry_of(root, BLOCKS - 1).location
    slab_of(root, last).unlink()
    done = report(root, capsys, "repair")
    assert done["dropped"] == {"checksum": 1, "no_slab": BLOCKS - SLAB_SLOTS}
    assert (done["adopted"], done["left"]) == (0, {})
    assert report(root, capsys, "check", "--all")["intact"] == SLAB_SLOTS - 1
    assert len(present(root)) == SLAB_SLOTS - 1
    assert report(root, capsys, "repair")["dropped"] == {}
    assert "0 blocks taken up, 0 deleted, 0 damaged ones left" in text(root, capsys, "repair")


@pytest.mark.parametrize("also_index", [True, False])
def test_lost_journals_are_made_again_from_the_slabs(
    root: Path, capsys: pytest.CaptureFixture[str], also_index: bool
) -> None:
    before = entry_of(root, 7)
    for path in (root / NAMESPACE / "journals").iterdir():
        path.unlink()
    if also_index:
        shutil.rmtree(root.parent / "index")
        assert report(root, capsys, "check", "--all")["orphans"] == BLOCKS
    assert report(root, capsys, "repair")["adopted"] == BLOCKS
    assert entry_of(root, 7) == before
    assert present(root) == list(range(BLOCKS))
    assert report(root, capsys, "repair")["adopted"] == 0


def test_deleted_blocks_stay_deleted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(root.parent)
    store.delete([key(2)])
    assert store.sync(60)
    store.close()
    assert report(root, capsys, "check", "--all")["orphans"] == 0
    assert report(root, capsys, "repair")["adopted"] == 0
    assert 2 not in present(root)


def test_what_an_engine_is_writing_is_neither_damaged_nor_an_orphan(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slot whose block is young may be on its way to the journal."""
    location = entry_of(root, 0).location._replace(slab=1, slot=SLAB_SLOTS - 1, generation=1 << 62)
    entry = Entry(location, PAYLOAD, bytes(8), 64, wall_ms(), wall_ms(), 0, 0)
    slot = bytearray(SLOT)
    slot[:PAYLOAD] = payload(99)
    Seal(descriptor().digest()).write(memoryview(slot)[-HEADER_BYTES:], key(99), entry, memoryview(slot)[:PAYLOAD])
    with slab_of(root, location).open("r+b") as file:
        file.seek(location.slot * SLOT)
        file.write(slot)
    assert report(root, capsys, "check", "--all")["orphans"] == 0
    old = entry._replace(created_ms=wall_ms() - HOUR_MS)
    Seal(descriptor().digest()).write(memoryview(slot)[-HEADER_BYTES:], key(99), old, memoryview(slot)[:PAYLOAD])
    with slab_of(root, location).open("r+b") as file:
        file.seek(location.slot * SLOT)
        file.write(slot)
    assert report(root, capsys, "check", "--all")["orphans"] == 1


def test_repair_beside_a_running_engine(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(root.parent)
    flip(root, 3, 100)
    assert report(root, capsys, "repair")["dropped"] == {"checksum": 1}
    assert store.sync(60)
    assert [number for number, block in enumerate(get(store, range(BLOCKS))) if block is None] == [3]
    fill(store, range(3, 4))
    assert get(store, [3]) == [payload(3)]
    store.close()


def test_blocks_of_another_secret_are_reported_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(tmp_path, secret=bytes(32))
    fill(store, range(3))
    store.close()
    root = tmp_path / "root"
    (tmp_path / "right").write_bytes(bytes(32))
    (tmp_path / "wrong").write_bytes(bytes([1] * 32))
    assert report(root, capsys, "check", "--secret-file", str(tmp_path / "right"))["intact"] == 3
    wrong = ("--secret-file", str(tmp_path / "wrong"))
    assert report(root, capsys, "check", *wrong, code=1)["damaged"] == {"mac": 3}
    assert report(root, capsys, "repair", *wrong)["left"] == {"mac": 3}
    assert report(root, capsys, "check", "--secret-file", str(tmp_path / "right"))["intact"] == 3


def test_stats_are_sums_over_the_store(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(root, capsys, "stats")
    assert (found["keys"], found["bytes"]) == (BLOCKS, BLOCKS * PAYLOAD)
    assert (found["slots_used"], found["slots"], found["slot_bytes"]) == (BLOCKS, 2 * SLAB_SLOTS, SLOT)
    assert (found["used_bytes"], found["capacity_bytes"]) == (BLOCKS * SLOT, 4 * SLAB_SLOTS * SLOT)
    assert found["tenants"] == {
        f"{tenant_tag('a'):08x}": {"keys": 12, "bytes": 12 * PAYLOAD},
        f"{tenant_tag('b'):08x}": {"keys": 8, "bytes": 8 * PAYLOAD},
    }
    assert found["ttl_seconds"] == {"259200": {"keys": BLOCKS, "bytes": BLOCKS * PAYLOAD}}
    assert found["ages"] == {"1m": 0, "1h": 0, "1d": BLOCKS, "3d": 0, "7d": 0, "older": 0, "pinned": 0}
    assert found["slab_disk_bytes"] >= 2 * SLAB_SLOTS * SLOT
    assert "ages" not in report(root, capsys, "stats", "--no-ages")
    printed = text(root, capsys, "stats")
    assert "kept 3d: 20 blocks, 120 kB" in printed and "capacity: 164 kB used of 524 kB, 31%" in printed


def test_ls_orders_filters_and_limits(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(root.parent, touch_interval_s=0.001)
    use(store, 4)
    store.close()
    assert [block["key"] for block in report(root, capsys, "ls", "--limit", "1")["blocks"]] == [key(4).hex()]
    oldest = report(root, capsys, "ls", "--oldest", "--limit", "3")["blocks"]
    assert len(oldest) == 3 and key(4).hex() not in [block["key"] for block in oldest]
    of_b = report(root, capsys, "ls", "--tenant", "b")["blocks"]
    assert {block["key"] for block in of_b} == {key(number).hex() for number in range(12, BLOCKS)}
    assert {block["tenant"] for block in of_b} == {f"{tenant_tag('b'):08x}"}
    (one,) = report(root, capsys, "ls", "--prefix", key(6).hex()[:20])["blocks"]
    assert (one["key"], one["bytes"], one["tokens"], one["ttl_seconds"]) == (key(6).hex(), PAYLOAD, 64, 259200)
    assert f"{key(6).hex()} 6000 B, 64 tokens" in text(root, capsys, "ls")


def test_purge_by_tenant(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(root, capsys, "purge", "--tenant", "b", "--dry-run")["blocks"] == 8
    assert len(present(root)) == BLOCKS
    done = report(root, capsys, "purge", "--tenant", "b", "--yes")
    assert (done["blocks"], done["bytes"], done["deleted"]) == (8, 8 * PAYLOAD, 8)
    assert present(root) == list(range(12))


def test_purge_by_age_beside_a_running_engine(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(root.parent, touch_interval_s=0.001)
    use(store, 4)
    fill(store, range(BLOCKS, BLOCKS + 2))
    store.close()
    store = open_store(root.parent)
    assert report(root, capsys, "purge", "--older-than", "2h", "--yes")["deleted"] == 0
    assert report(root, capsys, "purge", "--older-than", "30m", "--yes")["deleted"] == BLOCKS - 1
    assert store.sync(60)
    assert [number for number in range(BLOCKS + 2) if store.contains([key(number)])[0]] == [4, BLOCKS, BLOCKS + 1]
    fill(store, range(100, 140))
    assert store.stats().dropped == {}
    store.close()


def test_purge_all_and_remove(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(root.parent)
    capsys.readouterr()
    run(root, "purge", "--all", "--remove", "--yes", code=1)
    assert "has live writers: stop the engines" in capsys.readouterr().err
    assert report(root, capsys, "purge", "--all", "--yes")["deleted"] == BLOCKS
    assert store.sync(60)
    assert not any(store.contains([key(number) for number in range(BLOCKS)]))
    fill(store, range(2))
    store.close()
    done = report(root, capsys, "purge", "--all", "--remove", "--yes")
    assert (done["deleted"], done["removed"]) == (2, True)
    assert list(root.iterdir()) == []
    assert list((root.parent / "index").iterdir()) == []
    store = open_store(root.parent)
    fill(store, range(2))
    store.close()
    assert present(root) == [0, 1]


@pytest.mark.parametrize("answer", ["y", "n"])
def test_purge_asks_where_somebody_can_answer(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    capsys.readouterr()
    run(root, "purge", "--all", code=1)
    assert "nobody can be asked: repeat it with --yes" in capsys.readouterr().err
    asked: list[str] = []

    def confirm(question: str, **_: Any) -> None:
        asked.append(question)
        if answer == "n":
            raise main.typer.Abort

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(main.typer, "confirm", confirm)
    run(root, "purge", "--all", code=0 if answer == "y" else 130)
    assert asked == ["Delete 20 blocks (120 kB) of m?"]
    assert len(present(root)) == (0 if answer == "y" else BLOCKS)


class Terminal:
    """Standard input of somebody who sits there."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", [["repair"], ["purge", "--all", "--yes"]])
def test_what_engines_could_not_read_is_not_written(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(ownership, "owner_of", lambda path: 7 if path.is_dir() else 8)
    run(root, *command, code=1)
    assert "belongs to user 7, whose engines cannot read what user 8 writes" in capsys.readouterr().err
    assert len(present(root)) == BLOCKS


@pytest.mark.parametrize("meta", ["", "[" * 100_000, '{"format_version": 9}'])
def test_a_namespace_that_makes_no_sense_is_in_nobodys_way_who_names_another(
    root: Path, capsys: pytest.CaptureFixture[str], meta: str
) -> None:
    (root / ("0" * 16)).mkdir()
    (root / ("0" * 16) / "meta.json").write_text(meta)
    run(root, "stats", code=1)
    error = capsys.readouterr().err
    assert "0000000000000000/meta.json: " in error and "remove it" in error and error.count("\n") == 1
    assert report(root, capsys, "stats", "--namespace", NAMESPACE)["keys"] == BLOCKS


def test_pinned_blocks_are_listed_as_such(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = Index.open(root.parent / "index" / NAMESPACE, descriptor().digest(), root=str(root))
    entry = index.get(key(5))
    assert entry is not None
    writer = JournalWriter([root / NAMESPACE / "journals"], 7, 1, descriptor().digest())
    writer.append([Record.touch(key(5), entry, wall_ms() + HOUR_MS)])
    writer.close()
    index.close()
    assert "pinned for 60m" in text(root, capsys, "ls", "--prefix", key(5).hex())
    assert report(root, capsys, "stats")["ages"]["pinned"] == 1


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("check", ["--namespace", "0" * 16], "has no namespace 0000000000000000: it has " + NAMESPACE),
        ("check", ["--secret-file", "/none"], "--secret-file /none: No such file"),
        ("check", ["--secret-file", "/dev/null"], "secret has 0 bytes"),
        ("ls", ["--prefix", "xyz"], "--prefix 'xyz': an even number of hex digits"),
        ("purge", [], "name what to delete"),
        ("purge", ["--all", "--tenant", "a"], "name what to delete"),
        ("purge", ["--tenant", "a", "--remove"], "--remove goes with --all"),
        ("purge", ["--older-than", "soon"], "--older-than 'soon': a number and s, m, h or d"),
        ("purge", ["--older-than", "none", "--yes"], "--older-than 'none': a number and s, m, h or d"),
        ("purge", ["--older-than", "1d,age=none", "--yes"], "--older-than '1d,age=none': a number and s, m, h or d"),
    ],
)
def test_bad_input_is_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], message: str
) -> None:
    capsys.readouterr()
    run(root, command, *arguments, code=1)
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err and output.err.startswith("deepinfer: ") and output.err.count("\n") == 1


@pytest.mark.parametrize("command", ["check", "repair", "stats", "ls"])
def test_a_root_without_a_store_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    for root, message in ((tmp_path / "none", "is not a directory"), (tmp_path, "has no namespace: it has none")):
        run(root, command, code=1)
        output = capsys.readouterr()
        assert message in output.err and output.err.count("\n") == 1


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """The roots of a closed store of 20 blocks over 2 + 1 roots."""
    roots = [tmp_path / name for name in ("root", "second", "third")]
    for root in roots:
        root.mkdir()
    store = open_store(tmp_path, ec="2+1", roots=tuple(roots), clock_ms=lambda: wall_ms() - HOUR_MS)
    fill(store, range(BLOCKS))
    store.close()
    return roots


def with_roots(roots: list[Path]) -> list[str]:
    return [argument for root in roots[1:] for argument in ("--root", str(root))]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_erasure_coded_store_is_sound_with_a_root_lost(
    roots: list[Path], capsys: pytest.CaptureFixture[str], lost: int
) -> None:
    assert report(roots[0], capsys, "check", "--all", *with_roots(roots))["intact"] == BLOCKS
    shutil.rmtree(roots[lost])
    roots[lost].mkdir()
    found = report(roots[0], capsys, "check", "--all", *with_roots(roots))
    assert (found["intact"], found["damaged"], found["orphans"]) == (BLOCKS, {}, 0)
    assert report(roots[0], capsys, "stats", *with_roots(roots))["slots"] == 2 * SLAB_SLOTS
    for root in roots:
        shutil.rmtree(root / NAMESPACE / "journals", ignore_errors=True)
    shutil.rmtree(roots[0].parent / "index")
    assert report(roots[0], capsys, "repair", *with_roots(roots))["dropped"] == {}
    found = report(roots[0], capsys, "check", "--all", *with_roots(roots))
    assert (found["intact"], found["orphans"]) == (BLOCKS, 0)


def test_a_root_of_an_erasure_coded_store_alone_is_refused(
    roots: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its shards are no slots: repair would find every block damaged."""
    capsys.readouterr()
    run(roots[0], "repair", code=1)
    assert "1 roots for erasure code 2+1: it needs 3" in capsys.readouterr().err
    run(roots[0], "purge", "--all", "--remove", "--yes", *with_roots(roots))
    assert [path.name for root in roots for path in root.iterdir()] == ["stripe.json"] * 3


@pytest.fixture(autouse=True)
def _no_index_is_left_open(tmp_path: Path) -> Iterator[None]:
    yield
    from deepinfer_kvstore.environment import Environment

    assert [path for path in Environment._shared if path.is_relative_to(tmp_path.resolve())] == []
