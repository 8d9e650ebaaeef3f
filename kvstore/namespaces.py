"""The namespaces below a root, with their indexes: found and brought up to date while others make and remove them."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from time import monotonic

from deepinfer_kvstore.chain import ChainHasher
from deepinfer_kvstore.descriptor import Descriptor
from deepinfer_kvstore.entry import wall_ms
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.metrics import NamespaceState
from deepinfer_kvstore.opening import Places
from deepinfer_kvstore.quota import Quota
from deepinfer_kvstore.record import Op, Record
from deepinfer_kvstore.scribe import Scribe
from deepinfer_kvstore.stripe_set import existing_set

_NAME = re.compile("[0-9a-f]{16}")
_MAX_META_BYTES = 1 << 20
CLOSE_SECONDS = 5.0
MAX_PINS = 1 << 16
"""Pins between two syncs; of more, the later ones are lost."""
_log = logging.getLogger(__name__)


class Namespace:
    """One namespace as its readers need it. Thread-safe."""

    def __init__(self, places: Places, descriptor: Descriptor, root: Path, index_dir: Path) -> None:
        """`root`: the one that engines name.

        Raises:
            StoreConfigError: the index cannot be on `index_dir`.
        """
        self.name = descriptor.directory
        self.places = places
        self.descriptor = descriptor
        self.hasher = ChainHasher(descriptor.hash_tokens, bytes.fromhex(descriptor.none_hash))
        self.index = Index.open(index_dir / self.name, descriptor.digest(), root=str(root))
        self._journals = JournalSet(places.journals, descriptor.digest())
        self._scribe = Scribe(places, descriptor.digest(), self.index)
        self._pins: dict[Key, int] = {}
        self._pinning = Lock()
        self._syncing = Lock()
        self._closed = False
        self._quota = descriptor.payload_bytes, 0
        self._synced_at = monotonic()

    def pin(self, keys: Iterable[Key], until_ms: int) -> None:
        """Keep blocks, and those before them, from being collected until then (Unix time). From the next `sync` on."""
        with self._pinning:
            if len(self._pins) < MAX_PINS:
                for key in keys:
                    self._pins[key] = max(until_ms, self._pins.get(key, 0))

    def sync(self) -> Counter[str]:
        """Write pins down and apply what is new in the journals; how many records of each kind there were.

        Reads and writes the root; what fails there is logged.
        """
        with self._syncing:
            if self._closed:
                return Counter()
            self._write_pins()
            self._scribe.beat()
            applied = self.index.sync(self._journals)
            self._synced_at = monotonic()
        return Counter(put=applied.puts, delete=applied.deletes, touch=applied.touches)

    def _write_pins(self) -> None:
        with self._pinning:
            pins, self._pins = self._pins, {}
        found = zip(pins.items(), self.index.get_many(list(pins)), strict=True)
        # Half of what was asked for is enough, or each turn of a conversation would write.
        now = wall_ms()
        self._scribe.append(
            [
                Record(Op.TOUCH, key, entry._replace(touched_ms=until, ttl_class=0))
                for (key, until), entry in found
                if entry and entry.touched_ms < (now + until) // 2
            ]
        )

    def state(self) -> NamespaceState:
        """For a scrape."""
        totals = self.index.totals()
        slot_bytes, capacity_bytes = self._quota
        lag_seconds = monotonic() - self._synced_at
        return NamespaceState(self.name, totals.keys, totals.slots * slot_bytes, capacity_bytes, lag_seconds)

    def look(self) -> None:
        """See what engines have set anew. Reads the root."""
        if quota := Quota.read(self.places.found("quota.json")):
            self._quota = quota.slot_bytes, quota.capacity_bytes

    def close(self) -> None:
        """Idempotent. A `sync` that hangs in a file system is waited for, but not for long: it keeps what it uses."""
        if self._syncing.acquire(timeout=CLOSE_SECONDS):
            try:
                self._closed = True
                self._scribe.close()
                self._journals.close()
                self.index.close()
            finally:
                self._syncing.release()


class Namespaces:
    """All namespaces of one store. Thread-safe."""

    def __init__(self, root: Path, index_dir: Path, more_roots: Sequence[Path] = ()) -> None:
        """`more_roots`: with erasure coding, those after the first, in their order.

        Raises:
            StoreConfigError: `root` is no directory, or the roots are not those of a store.
        """
        self._stripe_set = existing_set([root, *more_roots])
        if not self._stripe_set and not root.is_dir():
            raise StoreConfigError(f"root {root} is not a directory: create it, or mount its file system")
        self._roots = self._stripe_set.control_roots if self._stripe_set else [root.resolve()]
        self._root = root.resolve()
        self._index_dir = index_dir
        self._open: dict[str, Namespace] = {}
        self._said: dict[str, str] = {}
        self._lock = Lock()

    def get(self, name: str) -> Namespace | None:
        """By the name of its directory."""
        with self._lock:
            return self._open.get(name)

    def all(self) -> Sequence[Namespace]:
        """Those found by the last `scan`."""
        with self._lock:
            return list(self._open.values())

    def scan(self) -> None:
        """Look for new ones and let go of removed ones. Reads the roots; one that cannot be read is logged once.

        Raises:
            OSError: no root can be listed.
        """
        there = self._names()
        for name in self._open.keys() - there:
            with self._lock:
                gone = self._open.pop(name)
            gone.close()
        for name in there - self._open.keys():
            try:
                found = self._read(name)
            except (OSError, ValueError, TypeError) as error:
                if self._said.get(name) != str(error):
                    self._said[name] = str(error)
                    _log.warning("namespace %s is left out: %s", name, error)
                continue
            if found:
                with self._lock:
                    self._open[name] = found
        for namespace in self.all():
            namespace.look()

    def _names(self) -> set[str]:
        names: set[str] = set()
        failures: list[OSError] = []
        for root in self._roots:
            try:
                names.update(name for name in os.listdir(root) if _NAME.fullmatch(name))
            except OSError as error:  # its replicas may be there
                failures.append(error)
        if len(failures) == len(self._roots):
            raise failures[0]
        return names

    def _read(self, name: str) -> Namespace | None:
        metas = [root / name / "meta.json" for root in self._roots]
        meta = next((path for path in metas if path.exists()), metas[0])
        try:
            with meta.open("rb") as file:
                text = file.read(_MAX_META_BYTES).decode()
        except FileNotFoundError:  # its engine is just making it
            return None
        descriptor = Descriptor.from_json(text, str(meta))
        _check(descriptor, meta)
        if descriptor.directory != name:
            raise StoreConfigError(f"{meta} describes {descriptor.directory}: remove the directory or put it back")
        places = Places(self._roots, descriptor, self._stripe_set)
        return Namespace(places, descriptor, self._root, self._index_dir)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            namespaces, self._open = list(self._open.values()), {}
        for namespace in namespaces:
            namespace.close()


def _check(descriptor: Descriptor, meta: Path) -> None:
    """Whoever wrote `meta` may be anyone with the root: refuse numbers that no chain has."""
    unit = descriptor.hash_tokens
    sizes = [group.tokens_per_block for group in descriptor.groups]
    windows = [group.window_tokens for group in descriptor.groups if group.window_tokens is not None]
    numbers = [unit, *sizes, *windows, *(group.payload_bytes for group in descriptor.groups)]
    if not all(type(number) is int and 0 < number < 1 << 32 for number in numbers) or any(
        size % unit for size in sizes
    ):
        raise StoreConfigError(
            f"{meta}: tokens, windows and bytes of blocks must be whole numbers above 0: remove the directory"
        )
    if not descriptor.groups or any(not 0 <= group.schema < 1 << 16 for group in descriptor.groups):
        raise StoreConfigError(f"{meta}: it needs groups, of schemas 0 to 65535: remove the directory")
