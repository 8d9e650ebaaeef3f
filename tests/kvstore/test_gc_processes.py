"""Collectors that do not know of each other, and collectors that are killed."""

import subprocess
import sys
import time
from pathlib import Path
from random import Random

from deepinfer_kvstore.store import Store
from store_case import SLAB_SLOTS, SLOT, get, open_store, payload, put

CHURN = """
import sys, time
from pathlib import Path
from random import Random
from deepinfer_kvstore import gc
from deepinfer_kvstore.gc_lease import GcLease
from store_case import get, key, open_store, payload, put

directory, index, seed, seconds, leads = sys.argv[1:]
gc.DELETE_BLOCKS = 3
if leads == "always":
    GcLease.hold = GcLease.held = lambda self: True
random = Random(int(seed))
options = {"collect_interval_s": 0.01, "io_timeout_s": 0.1, "lease_s": 0.5}
store = open_store(Path(directory), slabs=6, index_dir=Path(directory, index), **options)
print("open", flush=True)
until = time.monotonic() + float(seconds)
while time.monotonic() < until or not store.stats().evicted:
    first = random.randrange(400)
    numbers = range(first, first + random.randrange(1, 12))
    put(store, numbers)
    for number, found in zip(numbers, get(store, numbers)):
        assert found in (None, payload(number)), number
print(sum(store.stats().evicted.values()), flush=True)
store.close()
"""


def churn(tmp_path: Path, index: str, seed: int, seconds: float, leads: str) -> subprocess.Popen[str]:
    """A process that puts, gets and collects."""
    command = [sys.executable, "-c", CHURN, str(tmp_path), index, str(seed), str(seconds), leads]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    )


def hold_to_account(store: Store) -> None:
    """Every block is right or missed; slots are used exactly by the blocks that the index has."""
    assert store.sync(60)
    results = get(store, range(412))
    assert all(found in (None, payload(number)) for number, found in enumerate(results))
    assert any(results)
    assert store.sync(60)
    slots = store._held().slots
    taken = sum(len(slots.taken(*slab)) for slab in slots.slabs())
    own = sum(len(store.index.slots_of(*slab)) for slab in slots.slabs())
    assert taken == own


def test_two_collectors_at_once_harm_nobody(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    both = [churn(tmp_path, f"index-{seed}", seed, 4.0, "always") for seed in (1, 2)]
    outputs = [process.communicate(timeout=120)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(int(evicted) > 0 for _, evicted in outputs)
    store = open_store(tmp_path, slabs=6)
    hold_to_account(store)
    store.close()


def test_a_collector_that_is_killed_leaves_nothing_to_repair(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    random = Random(3)
    for seed in range(6):
        process = churn(tmp_path, "index", seed, 60.0, "by lease")
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        time.sleep(random.uniform(0.3, 1.2))
        process.kill()
        process.wait()
        slabs = list((tmp_path / "root").glob("*/slabs/*.slab"))
        assert len(slabs) <= 6
    store = open_store(tmp_path, slabs=6, collect_interval_s=0.01, lease_s=0.2, io_timeout_s=0.5)
    hold_to_account(store)
    deadline = time.monotonic() + 60
    while put(store, range(1000, 1004)) != [True] * 4:  # killed holders of the lease keep nobody from collecting
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert store.stats().used_bytes <= 6 * SLAB_SLOTS * SLOT
    store.close()
