"""Several writers on one root: the same key at once, an identity that is taken away, and what they leave behind."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from time import monotonic, sleep

import pytest

from deepinfer_kvstore.store import Store
from store_case import SLOT, get, key, open_store, payload, put


def until(what: Callable[[], bool]) -> None:
    deadline = monotonic() + 60
    while not what():
        assert monotonic() < deadline
        sleep(0.02)


def test_two_writers_of_one_key_leave_one_block_that_all_agree_on(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, index_dir=tmp_path / f"{n}", sync_interval_s=60, io_timeout_s=5) for n in range(3)]
    gate = Barrier(3)
    results: dict[int, list[bool]] = {}

    def write(number: int) -> None:
        gate.wait()
        results[number] = put(stores[number], range(12), lambda n: payload(1000 * number + n))

    threads = [Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [True] * 12 for number in range(3)}
    for _ in range(3):  # read of the others, delete what lost, read that
        assert all(store.sync(30) for store in stores)
    found = [get(store, range(12)) for store in stores]
    assert found[0] == found[1] == found[2]
    for number, block in enumerate(found[0]):
        assert block in [payload(1000 * writer + number) for writer in range(3)]
    assert [store.stats().used_bytes for store in stores] == [12 * SLOT] * 3
    assert sum(store._held().slots.counts()[1] for store in stores) == 12, "who lost has its slots back"
    for store in stores:
        store.close()


def lease_of(tmp_path: Path, store: Store) -> Path:
    (lease,) = (tmp_path / "root").glob(f"*/writers/{store.writer:08x}.lease")
    return lease


def test_a_writer_whose_identity_was_taken_goes_on_as_another(tmp_path: Path) -> None:
    store = open_store(tmp_path, lease_s=0.4)
    put(store, range(4))
    first, lease = store.writer, lease_of(tmp_path, store)
    lease.write_text(json.dumps({**json.loads(lease.read_text()), "token": "another's", "epoch": 2}))
    taken = lease.read_text()
    until(lambda: store.writer != first)
    assert put(store, range(4, 8)) == [True] * 4
    assert get(store, range(8)) == [payload(n) for n in range(8)]
    assert lease.read_text() == taken, "what is another's is left alone"
    store.close()
    assert {int(path.name[:8], 16) for path in (tmp_path / "root").glob("*/slabs/*.slab")} == {first, store.writer}


def test_nothing_is_written_under_an_identity_that_was_taken(tmp_path: Path) -> None:
    """Between the loss and the next identity puts are dropped, and none of them is torn into another's slots."""
    store = open_store(tmp_path, lease_s=0.4, sync_interval_s=60)
    put(store, [1])
    lease = lease_of(tmp_path, store)
    lease.write_text(json.dumps({**json.loads(lease.read_text()), "token": "another's", "epoch": 2}))
    (slab,) = (tmp_path / "root").glob("*/slabs/*.slab")
    before = slab.read_bytes()
    sleep(0.5)
    assert put(store, [2]) == [False]
    assert store.stats().dropped == {"lease": 1} and slab.read_bytes() == before
    store.close()


def test_slabs_that_could_not_be_taken_over_are_left_for_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, dead = open_store(tmp_path), open_store(tmp_path)
    put(dead, range(3))
    left = dead.writer
    dead.close()

    def unreadable(*_: object) -> None:
        raise OSError("the directory cannot be read")

    holdings = store._held()
    for works in (False, True):
        with monkeypatch.context() as now:
            holdings._is_short = True
            if not works:
                now.setattr(holdings, "_take_slabs", unreadable)
                with pytest.raises(OSError, match="cannot be read"):
                    holdings.adopt(store._claims, store.index, store._journals)
            else:
                assert holdings.adopt(store._claims, store.index, store._journals)
        assert holdings.owners() == [store.writer, left][: 1 + works]
    assert holdings.slots.slabs() == [(left, 0)]
    store.close()


def test_processes_that_store_at_once_share_everything(root: Path, tmp_path: Path) -> None:
    """Four processes, half of their keys in common, one index."""
    code = f"""
import sys
sys.path.insert(0, {str(root / "tests")!r})
from pathlib import Path
from store_case import get, open_store, payload, put
number = int(sys.argv[1])
store = open_store(Path({str(tmp_path)!r}), slabs=16)
mine = [*range(20), *range(100 * number, 100 * number + 20)]
for at in range(0, 40, 5):
    assert put(store, mine[at : at + 5]) == [True] * 5, store.stats()
    assert get(store, mine[: at + 5]) == [payload(n) for n in mine[: at + 5]]
store.close()
"""
    (tmp_path / "root").mkdir()
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(number)], stderr=subprocess.PIPE, text=True)
        for number in range(1, 5)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    store = open_store(tmp_path, slabs=16)
    every = [*range(20), *(100 * number + k for number in range(1, 5) for k in range(20))]
    assert get(store, every) == [payload(n) for n in every]
    store.sync(30)
    assert len([there for there in store.contains([key(n) for n in every]) if there]) == 100
    store.close()
