"""Many requests through few host rows, in random order: what is loaded is right, and nothing asserts. vllm#54914"""

import random
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kv_connector.offline import PAYLOAD, WINDOW, Offline, keys

STEPS, PROMPTS, BLOCKS = 150, 5, 7


class Engine:
    """What vLLM's scheduler and workers do with a manager, for prompts of two groups."""

    def __init__(self, offline: Offline, drawn: random.Random) -> None:
        self.offline, self.drawn = offline, drawn
        self.waiting: list[tuple[ReqContext, int]] = []
        self.storing: list[tuple[ReqContext, list[OffloadKey]]] = []
        self.loading: list[tuple[ReqContext, list[OffloadKey]]] = []
        self.loads = self.number = 0

    def arrive(self) -> None:
        seed = self.drawn.randrange(PROMPTS)
        self.number += 1
        self.waiting.append(
            (self.offline.request(f"r{self.number}", keys(BLOCKS, seed=seed), keys(BLOCKS, WINDOW, seed)), seed)
        )

    def admit(self) -> None:
        """Look a waiting request up: it loads what is there and computes, then stores, the rest; or waits."""
        request, seed = self.waiting.pop(0)
        manager, blocks, window = self.offline.manager, keys(BLOCKS, seed=seed), keys(BLOCKS, WINDOW, seed)
        found = []
        for key in blocks:
            found.append(manager.lookup(key, request))
            if found[-1] is LookupResult.MISS:
                break
        count = len(found) - (found[-1] is LookupResult.MISS)
        last = manager.lookup(window[count - 1], request) if count else LookupResult.MISS
        if LookupResult.HIT_PENDING in (*found, last):
            self.waiting.append((request, seed))
            return
        if count and last is LookupResult.HIT:
            loaded = [*blocks[:count], window[count - 1]]
            for key, row in zip(loaded, manager.prepare_load(loaded, request).chunk_ids, strict=True):
                assert (self.offline.rows[row, :PAYLOAD] == self.value(key)).all()
            self.loading.append((request, loaded))
            self.loads += len(loaded)
        else:
            count = 0
        computed = [*blocks[count:], window[-1]]
        output = manager.prepare_store(computed, request)
        if output is not None and output.keys_to_store:
            for key, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
                self.offline.rows[row, :PAYLOAD] = self.value(key)
            self.storing.append((request, output.keys_to_store))
        manager.on_request_finished(request)

    def finish_copies(self) -> None:
        manager = self.offline.manager
        while self.storing and self.drawn.random() < 0.7:
            request, stored = self.storing.pop(0)
            if self.drawn.random() < 0.1:
                manager.fail_store(stored)
            manager.complete_store(set(stored), request)
        while self.loading and self.drawn.random() < 0.7:
            request, loaded = self.loading.pop(0)
            for key in loaded:  # the rows were pinned: still what they were
                row = manager.primary_tier._policy.get(key).chunk_id
                assert (self.offline.rows[row, :PAYLOAD] == self.value(key)).all()
            manager.complete_load(loaded, request)

    @staticmethod
    def value(key: OffloadKey) -> int:
        return (key[0] * BLOCKS + key[1] + 100 * (key[-1] == WINDOW)) % 251 + 1


@pytest.mark.parametrize("rows", [9, 14, 30])
def test_random_requests(tmp_path: Path, rows: int) -> None:
    for seed in range(2):  # the second round finds the first one's store
        offline = Offline.open(tmp_path / "root", rows)
        engine = Engine(offline, random.Random(100 * rows + seed))
        for _ in range(STEPS):
            if engine.drawn.random() < 0.5:
                engine.arrive()
            for _ in range(min(len(engine.waiting), 2)):
                engine.admit()
            offline.step()
            engine.finish_copies()
        while engine.waiting or engine.storing or engine.loading:
            if engine.waiting:
                engine.admit()
            offline.settle()
            engine.finish_copies()
        offline.settle()
        stats = offline.tier._store.stats()
        assert engine.loads > 0 and not offline.tier.captive
        assert set(stats.misses) <= {"absent"}
        free = offline.manager.primary_tier
        assert free._num_write_pending_chunks == 0
        assert free._num_allocated_chunks - len(free._free_list) == free._num_evictable_cache_chunks
        offline.close()
