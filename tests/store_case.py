"""Small stores for tests."""

import hashlib
import random
from collections.abc import Callable, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

from deepinfer_kvstore.descriptor import Descriptor, Group
from deepinfer_kvstore.keys import Key, make_key
from deepinfer_kvstore.options import StoreOptions
from deepinfer_kvstore.store import Put, Store

PAYLOAD = 6000
SLOT = 8192
SLAB_SLOTS = 16


def descriptor(payload_bytes: int = PAYLOAD, **changes: Any) -> Descriptor:
    fields: dict[str, Any] = {
        "model": "m", "weights": "w", "kv_dtype": "bf16", "record_format": "r", "layout": "l",
        "hash_algorithm": "sha256_cbor", "none_hash": "00" * 32, "hash_tokens": 64, "shards": "all",
        "groups": (Group(1, 64, payload_bytes),),
    }  # fmt: skip
    return Descriptor(**{**fields, **changes})


def options(tmp_path: Path, slabs: int = 4, **changes: Any) -> StoreOptions:
    size = SLAB_SLOTS * SLOT
    fields: dict[str, Any] = {
        "capacity_bytes": slabs * size, "slab_bytes": size, "index_dir": tmp_path / "index", "io_threads": 2,
        "sync_interval_s": 0.05, "collect_interval_s": None,
    }  # fmt: skip
    return StoreOptions(**{**fields, **changes})


def open_store(tmp_path: Path, slabs: int = 4, **changes: Any) -> Store:
    """The store of `tmp_path`. What is no option goes to `Store.open`, as does a `backend` that is no name."""
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    given = {name: changes.pop(name) for name in ("clock_ms",) if name in changes}
    if not isinstance(changes.get("backend", ""), str):
        given["backend"] = changes.pop("backend")
    return Store.open(root, changes.pop("descriptor", descriptor()), options(tmp_path, slabs, **changes), **given)


def key(number: int, schema: int = 1) -> Key:
    return make_key(schema, hashlib.sha256(number.to_bytes(8, "big")).digest())


def payload(number: int, length: int = PAYLOAD) -> bytes:
    return random.Random(number).randbytes(length)


def aligned(length: int) -> memoryview:
    """Page-aligned memory."""
    return memoryview(mmap(-1, max(1, -(-length // 4096)) * 4096))[:length]


def put(store: Store, numbers: Sequence[int], content: Callable[[int], bytes] = payload, **more: Any) -> list[bool]:
    """Store block `content(number)` under `key(number)` for each number, and wait. `more`: of `Store.put`."""
    puts = [Put(key(n), memoryview(content(n)), key(n)[2:10], 64 * (at + 1)) for at, n in enumerate(numbers)]
    transfer = store.put(puts, **{"timeout_s": 60, **more})  # stores with a short `io_timeout_s` let slots rest briefly
    assert transfer.wait(60)
    return transfer.results()


def get(store: Store, numbers: Sequence[int], length: int = PAYLOAD) -> list[bytes | None]:
    """Load the blocks of `numbers`, and wait; None for a miss."""
    buffers = [aligned(length) for _ in numbers]
    transfer = store.get([key(n) for n in numbers], buffers, timeout_s=60)
    assert transfer.wait(60)
    return [bytes(buffer) if ok else None for ok, buffer in zip(transfer.results(), buffers, strict=True)]
