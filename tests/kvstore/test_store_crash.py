"""A writer that is killed at any step of a put: what was visible stays, what was not is exact or absent."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from crashing_writer import BEFORE, DURING
from deepinfer_kvstore.store import Store
from store_case import SLAB_SLOTS, SLOT, get, open_store, payload, put

LOST = ["before the write", "amid the write", "after the write", "after a new slab"]
"""Points before the journal has the records."""
KEPT = ["after the journal", "after the index", "when visible"]


def crash(root: Path, tmp_path: Path, point: str) -> None:
    command = [sys.executable, str(root / "tests" / "crashing_writer.py"), str(tmp_path), point]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr


def slots_are_accounted(store: Store) -> None:
    free, taken, resting = store._held().slots.counts()
    assert taken * SLOT == store.stats().used_bytes and resting == 0
    assert free + taken == SLAB_SLOTS * len(store._held().slots.slabs())


@pytest.mark.parametrize("index", ["index", "lost-index"])
@pytest.mark.parametrize("point", [*LOST, "amid the journal", *KEPT])
def test_killed(root: Path, tmp_path: Path, point: str, index: str) -> None:
    """# LMCache#2273, LMCache#4546, vllm#57303"""
    crash(root, tmp_path, point)
    store = open_store(tmp_path, index_dir=tmp_path / index)
    assert store.writer in {int(path.stem, 16) for path in (tmp_path / "root").glob("*/writers/*.lease")}
    assert len(list((tmp_path / "root").glob("*/writers/*.lease"))) == 1, "the dead writer's slabs are gone on with"
    assert get(store, BEFORE) == [payload(number) for number in BEFORE]
    found = get(store, DURING)
    if point in LOST:
        assert found == [None] * len(DURING)
    elif point in KEPT:
        assert found == [payload(number) for number in DURING]
    else:
        assert found == [payload(DURING[0])] + [None] * (len(DURING) - 1)
    slots_are_accounted(store)
    assert put(store, DURING) == [True] * len(DURING)
    assert get(store, [*BEFORE, *DURING]) == [payload(number) for number in [*BEFORE, *DURING]]
    slots_are_accounted(store)
    store.close()


def test_killed_after_a_deletion(root: Path, tmp_path: Path) -> None:
    crash(root, tmp_path, "after a deletion")
    store = open_store(tmp_path)
    assert get(store, BEFORE) == [None] * len(BEFORE)
    slots_are_accounted(store)
    assert put(store, BEFORE) == [True] * len(BEFORE) and get(store, BEFORE) == [payload(n) for n in BEFORE]
    store.close()


def test_a_killed_writer_does_not_disturb_a_living_one(root: Path, tmp_path: Path) -> None:
    living = open_store(tmp_path, index_dir=tmp_path / "living")
    put(living, range(100, 110))
    identity = living.writer
    crash(root, tmp_path, "after the write")
    assert living.sync(60)
    assert get(living, [*BEFORE, *range(100, 110)]) == [payload(n) for n in [*BEFORE, *range(100, 110)]]
    assert living.writer == identity and put(living, range(110, 120)) == [True] * 10
    living.close()
