"""Whatever is put, used, pinned and collected in whatever order: what is there is whole prefixes, and right."""

from pathlib import Path
from random import Random

import pytest

from deepinfer_kvstore.gc import Collector, Need
from deepinfer_kvstore.gc_lease import GcLease
from deepinfer_kvstore.pace import Pace
from deepinfer_kvstore.retention import Retention
from deepinfer_kvstore.store import Put, Store
from store_case import SLAB_SLOTS, get, key, open_store, payload

CHAINS, BLOCKS, BRANCH = 6, 24, 8


def chain(number: int) -> list[int]:
    """Blocks of a chain; every second shares its first `BRANCH` with the one before it."""
    own = [number * 100 + at for at in range(BLOCKS)]
    return own if number % 2 == 0 else [(number - 1) * 100 + at for at in range(BRANCH)] + own[BRANCH:]


class Clock:
    now_ms = 1_800_000_000_000


def collector(store: Store, directory: Path, need: list[Need]) -> Collector:
    return Collector(
        store.index, GcLease(directory, 60), Retention(ttl={"brief": 60}, expired_per_hour=1e6),
        append=store._append_now, sync=store.sync, fill=store._fill, need=lambda: need.pop() if need else None,
        lease_s=60, pace=Pace(), wall=lambda: Clock.now_ms / 1000,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_what_is_there_is_whole_prefixes(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    retention = Retention(ttl={"brief": 60})
    store = open_store(tmp_path, slabs=4, retention=retention, clock_ms=lambda: Clock.now_ms, touch_interval_s=1e-3)
    store._held().slots._quarantine_seconds = 0.0
    need: list[Need] = []
    collects = collector(store, tmp_path, need)
    pinned: dict[int, tuple[int, int]] = {}
    evicted = 0
    for _ in range(80):
        Clock.now_ms += random.randrange(40_000)
        number = random.randrange(CHAINS)
        numbers = chain(number)[: random.randrange(1, BLOCKS + 1)]
        keys = [key(n) for n in numbers]
        there = store.longest_prefix(keys)
        assert get(store, numbers[:there]) == [payload(n) for n in numbers[:there]]
        action = random.random()
        if action < 0.6:
            store.touch(keys[:there], random.choice(("brief", "agent")))
            puts = [
                Put(key(n), memoryview(payload(n)), key(numbers[at - 1])[2:10] if at else bytes(8), 64 * (at + 1))
                for at, n in enumerate(numbers)
            ]
            transfer = store.put(puts, ttl_class=random.choice(("brief", "agent")))
            assert transfer.wait(30)
        elif action < 0.7 and there:
            store.pin(keys[there - 1 : there], 30)
            pinned[number] = there, Clock.now_ms + 30_000
        else:
            if random.random() < 0.3:
                need.append(Need(store._held().owners(), random.randrange(1, SLAB_SLOTS)))
            collects._scan_at = 0.0
            evicted += sum(collects.step().evicted.values())
        assert store.sync(60)
        for which in range(CHAINS):
            found = store.index.contains([key(n) for n in chain(which)])
            assert found == sorted(found, reverse=True), f"chain {which} has a hole"
            kept, until = pinned.get(which, (0, 0))
            assert Clock.now_ms >= until or all(found[:kept])
    assert evicted > 0
    store.close()
