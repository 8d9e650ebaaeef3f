"""LMCache's second level over our store: its "plugin" adapter, so that users of LMCache can have the store alone.

LMCache says what to store and when; names become keys, whose hash covers all that its names have. It is not imported
by anything else here, and needs neither vLLM nor torch from us: it runs in LMCache's own environment.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from threading import Lock
from typing import Any

import cbor2
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from deepinfer_kvstore.descriptor import Descriptor, Group
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.keys import Key, make_key
from deepinfer_kvstore.options import StoreOptions
from deepinfer_kvstore.store import Put, Store
from deepinfer_kvstore.transfer import Transfer

SCHEMA = 0x4C4D
"""Schema id of LMCache's objects: we do not know what they hold."""
LOCK_SECONDS = 60.0
"""What a lookup has found is kept from collection for so long."""
_PATHS = ("index_dir",)
_OPTIONS = {field.name for field in fields(StoreOptions)} - {"secret", "retention"}


class StoreL2AdapterConfig(L2AdapterConfigBase):
    """`adapter_params`: `root`, `object_bytes`, `namespace`, and the options of the store, as `capacity_bytes`."""

    def __init__(self, root: Path, object_bytes: int, namespace: str, options: StoreOptions) -> None:
        self.root, self.object_bytes, self.namespace, self.options = root, object_bytes, namespace, options

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "StoreL2AdapterConfig":
        """
        Raises:
            ValueError: something is missing, unknown or out of range: one line that says what.
        """
        if unknown := d.keys() - _OPTIONS - {"root", "object_bytes", "namespace"}:
            raise StoreConfigError(f"adapter_params: {sorted(unknown)[0]!r} is unknown:\n{cls.help()}")
        root, object_bytes, namespace = d.get("root"), d.get("object_bytes"), d.get("namespace", "")
        if not isinstance(root, str) or not root:
            raise StoreConfigError(f"adapter_params: root is {root!r}: name the store's directory")
        if type(object_bytes) is not int or object_bytes < 1:
            raise StoreConfigError(f"adapter_params: object_bytes is {object_bytes!r}: bytes of the largest object")
        if not isinstance(namespace, str):
            raise StoreConfigError(f"adapter_params: namespace is {namespace!r}: a string")
        options = {name: value for name, value in d.items() if name in _OPTIONS}
        options.update({name: Path(options[name]) for name in _PATHS if options.get(name)})
        options["roots"] = tuple(Path(each) for each in options.get("roots", ()))
        try:
            checked = StoreOptions(**options)
            checked.check()
        except TypeError as error:
            raise StoreConfigError(f"adapter_params: {error}") from None
        return cls(Path(root), object_bytes, namespace, checked)

    @classmethod
    def help(cls) -> str:
        """What may stand in the dictionary."""
        return (
            "root (str): the store's directory\n"
            "object_bytes (int): bytes of the largest object\n"
            "namespace (str): differs between engines whose objects must not be mixed, as of two KV dtypes\n"
            f"and options of the store: {', '.join(sorted(_OPTIONS))}"
        )


class StoreL2Adapter(L2AdapterInterface):
    """Objects in the store. Thread-safe."""

    def __init__(self, config: StoreL2AdapterConfig, **_: Any) -> None:
        """
        Raises:
            StoreConfigError: the store cannot be opened so.
        """
        super().__init__()  # no capacity: the store collects by itself, under all its users
        self._store = Store.open(config.root, _descriptor(config), config.options)
        self._notifiers = {what: create_event_notifier() for what in ("store", "lookup", "load")}
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._tasks = 0
        self._lock = Lock()

    def get_store_event_fd(self) -> int:
        """Signalled when a store has ended."""
        return int(self._notifiers["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Signalled when a lookup has ended."""
        return int(self._notifiers["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        """Signalled when a load has ended."""
        return int(self._notifiers["load"].fileno())

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Store objects; the task succeeds if all of them are in the store then."""
        task = self._begin()
        tenants: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        for name, item in zip(keys, objects, strict=True):
            tenants[name.cache_salt].append((name, item))
        there = set(self._there(keys))
        left = len(tenants)
        moved, failed = 0, False

        def one_ended(named: list[tuple[Any, Any]], transfer: Transfer) -> None:
            nonlocal left, moved, failed
            results = transfer.results()
            new = [(name, item.get_size()) for (name, item), ok in zip(named, results, strict=True) if ok]
            new = [(name, size) for name, size in new if _key(name) not in there]
            if new:
                self._notify_keys_stored([name for name, _ in new], [size for _, size in new])
            with self._lock:
                left, failed = left - 1, failed or not all(results)
                moved += sum(size for _, size in new)
                if left:
                    return
                self._stored[task] = L2StoreResult(not failed, moved)
            self._notifiers["store"].notify()

        if not keys:
            self._finish(self._stored, task, L2StoreResult(True, 0), "store")
        for salt, named in list(tenants.items()):
            puts = [Put(_key(name), _bytes(item), bytes(8), 0) for name, item in named]
            self._store.put(puts, tenant=salt).when_done(_with(one_ended, named))
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results of the stores that have ended since the last call."""
        with self._lock:
            stored, self._stored = self._stored, {}
            return stored

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: dict[int, Any]) -> int:
        """Look objects up, in this node's index; those that are there are kept for `LOCK_SECONDS`."""
        task = self._begin()
        named = [_key(name) for name in keys]
        found = self._store.contains(named)
        self._store.pin([key for key, there in zip(named, found, strict=True) if there], LOCK_SECONDS)
        self._finish(self._found, task, _bitmap(found), "lookup")
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which were there, once."""
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Nothing: locks run out."""

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Load objects. Those that are gone or damaged are not loaded; their memory is undefined then."""
        task = self._begin()
        names, items = list(keys), list(objects)  # held until the store is through with their memory

        def ended(transfer: Transfer) -> None:
            results = transfer.results()
            if loaded := [name for name, ok in zip(names, results, strict=True) if ok]:
                self._notify_keys_accessed(loaded)
            self._finish(self._loaded, task, _bitmap(results), "load")

        if names:
            self._store.get([_key(name) for name in names], [_bytes(item) for item in items]).when_done(ended)
        else:
            self._finish(self._loaded, task, _bitmap([]), "load")
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which were loaded, once."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    def delete(self, keys: Sequence[Any]) -> None:
        """Remove objects, for all who share the store."""
        entries = self._store.index.get_many([_key(name) for name in keys])
        there = [(name, entry.length) for name, entry in zip(keys, entries, strict=True) if entry]
        self._store.delete([_key(name) for name, _ in there])
        if there:
            self._notify_keys_deleted([name for name, _ in there], [length for _, length in there])

    def get_usage(self) -> AdapterUsage:
        """What the store takes, of all its users. No capacity: LMCache shall not evict, the store does."""
        return AdapterUsage(total_bytes_used=self._store.stats().used_bytes, total_capacity_bytes=0)

    def report_status(self) -> dict[str, Any]:
        """The store's counters."""
        stats = self._store.stats()
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "hits": stats.hits,
            "misses": dict(stats.misses),
            "stores": stats.stores,
            "dropped": dict(stats.dropped),
            "used_bytes": stats.used_bytes,
            "capacity_bytes": stats.capacity_bytes,
        }

    def close(self) -> None:
        """Close the store, then what signals."""
        self._store.close()
        for notifier in self._notifiers.values():
            notifier.close()

    def _there(self, names: Sequence[Any]) -> list[Key]:
        keys = [_key(name) for name in names]
        return [key for key, there in zip(keys, self._store.contains(keys), strict=True) if there]

    def _begin(self) -> int:
        with self._lock:
            self._tasks += 1
            return self._tasks

    def _finish(self, results: dict[int, Any], task: int, result: Any, what: str) -> None:
        with self._lock:
            results[task] = result
        self._notifiers[what].notify()


def _with(
    call: Callable[[list[tuple[Any, Any]], Transfer], None], named: list[tuple[Any, Any]]
) -> Callable[[Transfer], None]:
    return lambda transfer: call(named, transfer)


def _key(name: Any) -> Key:
    """The key of an `ObjectKey`: over all of it, in one encoding."""
    parts = (name.chunk_hash, name.model_name, name.kv_rank, name.object_group_id, name.cache_salt)
    return make_key(SCHEMA, hashlib.sha256(cbor2.dumps(parts, canonical=True)).digest())


def _bytes(item: Any) -> memoryview:
    return memoryview(item.byte_array).cast("B")


def _bitmap(bits: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(bits))
    for number, bit in enumerate(bits):
        if bit:
            bitmap.set(number)
    return bitmap


def _descriptor(config: StoreL2AdapterConfig) -> Descriptor:
    """LMCache's names say the model; what they leave out is in `namespace`."""
    return Descriptor(
        model="any", weights="any", kv_dtype="any", record_format="lmcache object", layout=config.namespace,
        hash_algorithm="sha256", none_hash="00" * 32, hash_tokens=1, shards="one object each",
        groups=(Group(SCHEMA, 1, config.object_bytes),),
    )  # fmt: skip
