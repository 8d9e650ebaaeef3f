"""The scheduler's side without an engine: a manager over host rows and a real store, driven as vLLM drives it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from deepinfer_kvstore.descriptor import Descriptor, Group
from deepinfer_vllm.kv_connector.manager import StoreOffloadingManager
from deepinfer_vllm.kv_connector.tier import StoreTier

PAYLOAD, STRIDE, TOKENS = 5000, 8192, 32
FULL, WINDOW = 2, 5
"""vLLM's numbers of the two groups."""
DESCRIPTOR = Descriptor(
    model="m", weights="w", kv_dtype="float32", record_format="float32", layout="l", hash_algorithm="sha256_cbor",
    none_hash="00", hash_tokens=TOKENS, shards="1",
    groups=(Group(256, TOKENS, PAYLOAD), Group(512, TOKENS, PAYLOAD, window_tokens=TOKENS)),
)  # fmt: skip


def keys(count: int, group: int = FULL, seed: int = 0) -> list[OffloadKey]:
    """Keys of the blocks of a prompt."""
    return [make_offload_key(bytes([seed, number]) * 16, group) for number in range(count)]


@dataclass
class Offline:
    """One engine's scheduler."""

    manager: StoreOffloadingManager
    tier: StoreTier
    rows: np.ndarray[Any, np.dtype[np.uint8]]

    @classmethod
    def open(cls, root: Path, rows: int = 16, **extra: Any) -> "Offline":
        root.mkdir(exist_ok=True)
        memory = np.zeros((rows, STRIDE), dtype=np.uint8)
        region: Any = SimpleNamespace(create_kv_memoryview=lambda: memoryview(memory), cleanup=lambda: None)
        primary = CPUPrimaryTierOffloadingManager(rows, region, enable_events=True)
        small = {"capacity_bytes": 1 << 24, "slab_bytes": 1 << 20, "io_threads": 2, "sync_interval_s": 0.01}
        index = {"root": str(root), "index_dir": str(root.with_name(f"{root.name}-index"))}
        spec = SimpleNamespace(
            extra_config={**small, **index, **extra}, kv_events_config=OffloadingKVEventsConfig(True, True)
        )
        view = primary.get_kv_memoryview()
        schemas = {FULL: 256, WINDOW: 512}
        tier = StoreTier(spec, view, "StoreTier", descriptor=DESCRIPTOR.to_json(), schemas=schemas)
        return cls(StoreOffloadingManager(primary, [tier]), tier, memory)

    def request(self, name: str, *groups: Sequence[OffloadKey], **params: Any) -> ReqContext:
        request = ReqContext(name, kv_transfer_params=params or None)
        for group in groups:
            for number, key in enumerate(group):
                request.set_offload_key_position(key, (number + 1) * TOKENS)
        self.manager.on_new_request(request)
        return request

    def store(self, request: ReqContext, blocks: Sequence[OffloadKey], *, fails: bool = False) -> None:
        """As if an engine had copied blocks into their rows: each byte of a row tells its key."""
        output = self.manager.prepare_store(blocks, request)
        assert output is not None
        for key, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.rows[row, :PAYLOAD] = key[1] + 1
            self.rows[row, PAYLOAD:] = 255
        if fails:
            self.manager.fail_store(output.keys_to_store)
        self.manager.complete_store(set(output.keys_to_store), request)
        self.step()

    def step(self) -> None:
        """The end of a step of the scheduler."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Steps until nothing is on its way."""
        self.step()
        while self.manager.has_pending_work():
            for job in (*self.tier._loads.values(), *self.tier._stores.values()):
                assert job.transfer.wait(20)
            self.step()
        assert self.tier._store.sync(60)

    def look(self, request: ReqContext, blocks: Sequence[OffloadKey]) -> list[LookupResult]:
        return [self.manager.lookup(key, request) for key in blocks]

    def close(self) -> None:
        self.manager.shutdown()
