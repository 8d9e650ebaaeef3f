"""The store, driven as its tier drives it: one put or get a request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_kvstore.descriptor import Descriptor, Group
from deepinfer_kvstore.keys import make_key
from deepinfer_kvstore.options import StoreOptions
from deepinfer_kvstore.store import Put, Store
from deepinfer_kvstore.transfer import Transfer
from kv.contender import Request, Rows

SCHEMA = 1
HASH_TOKENS = 128
SECONDS = 60.0
"""Longest wait for a transfer."""


class SlabStore:
    """`direct` is the store's option, "auto" or "off", `more` are others. Several on one root share their blocks."""

    def __init__(self, root: Path, rows: Rows, *, direct: str, threads: int, **more: Any) -> None:
        self._root, self._rows = root, rows
        options = StoreOptions(
            capacity_bytes=4 << 30,
            index_dir=root.parent / "index",
            slab_bytes=256 << 20,
            direct=direct,
            io_threads=threads,
            **more,
        )
        self._store = Store.open(root, descriptor(rows.payload_bytes), options)

    @property
    def backend(self) -> Any:
        """What the store keeps its slabs in."""
        return self._store._backend

    def store(self, requests: Sequence[Request]) -> None:
        self._finish("stored", [self._store.put(self._puts(request)) for request in requests])

    def load(self, requests: Sequence[Request]) -> None:
        self._finish("loaded", [self._store.get(*self._gets(request)) for request in requests])

    def files(self) -> list[Path]:
        return [path for root in self._store.options.roots or [self._root] for path in root.rglob("*.slab")]

    def close(self) -> None:
        self._store.close()

    def _puts(self, request: Request) -> list[Put]:
        keys = [make_key(SCHEMA, block_hash) for block_hash in request.hashes]
        parents = [b"\0" * 32, *request.hashes]
        return [
            Put(key, self._rows.payload[row], parent[:8], (i + 1) * HASH_TOKENS)
            for i, (key, row, parent) in enumerate(zip(keys, request.rows, parents, strict=False))
        ]

    def _gets(self, request: Request) -> tuple[list[bytes], list[memoryview]]:
        keys = [make_key(SCHEMA, block_hash) for block_hash in request.hashes]
        return keys, [self._rows.payload[row + self._rows.blocks] for row in request.rows]

    def _finish(self, what: str, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            if not transfer.wait(SECONDS) or not all(transfer.results()):
                raise RuntimeError(f"store: {sum(transfer.results())} of {len(transfer.results())} blocks {what}")


def descriptor(payload_bytes: int) -> Descriptor:
    return Descriptor(
        model="benchmark",
        weights="none",
        kv_dtype="uint8",
        record_format="random",
        layout="random",
        hash_algorithm="sha256",
        none_hash="00" * 32,
        hash_tokens=HASH_TOKENS,
        shards="1",
        groups=(Group(SCHEMA, HASH_TOKENS, payload_bytes),),
    )
