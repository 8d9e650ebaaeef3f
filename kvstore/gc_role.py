"""Collection by the daemon: one collector for each namespace, so that no engine needs to."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.fill import Disks, Fill
from deepinfer_kvstore.gc import Collector
from deepinfer_kvstore.gc_lease import GcLease
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.namespaces import Namespace
from deepinfer_kvstore.ownership import require_same_owner
from deepinfer_kvstore.pace import Pace
from deepinfer_kvstore.quota import Quota
from deepinfer_kvstore.record import Record
from deepinfer_kvstore.scribe import Scribe

_log = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
SHARE = 0.2
"""Part of its time that a pass may work: CHECKs are answered beside it."""


class _NamespaceCollector:
    """What the daemon collects one namespace with."""

    def __init__(self, namespace: Namespace, quota: Quota) -> None:
        """Raises:
        StoreConfigError: the namespace is another user's: its engines would see no deletion, and leave us the lease.
        OSError: it cannot be written.
        """
        require_same_owner(namespace.places.namespace)
        self.namespace = namespace
        self.quota = quota
        places, digest = namespace.places, namespace.descriptor.digest()
        self._disk_slot_bytes = places.disk_slot_bytes(quota.slot_bytes)
        self._scribe = Scribe(places, digest, namespace.index, lease_s=LEASE_SECONDS)
        self._journals = JournalSet(places.journals, digest)
        self._disks = Disks(places.disks)
        self._collector = Collector(
            namespace.index, GcLease(places.namespace, LEASE_SECONDS), quota.retention,
            append=self._append, sync=lambda: namespace.index.sync(self._journals), fill=self._fill,
            lease_s=LEASE_SECONDS, pace=Pace(SHARE),
        )  # fmt: skip

    def step(self) -> Mapping[str, int]:
        """See `Collector.step`; what it evicted."""
        self._scribe.beat()
        return self._collector.step().evicted

    def end(self) -> None:
        """Let a step that is under way end soon."""
        self._collector.end()

    def close(self) -> None:
        """Leave the namespace to others."""
        self._collector.end()
        self._collector.release()
        self._scribe.close()
        self._journals.close()

    def _append(self, records: Sequence[Record]) -> None:
        if not self._scribe.append(records):
            raise OSError(f"{self.namespace.places.namespace}: no journal took {len(records)} deletions")

    def _fill(self) -> Fill:
        slot_bytes, capacity_bytes = self.quota.slot_bytes, self.quota.capacity_bytes
        used = self.namespace.index.used_slots()
        return Fill(self._disk_slot_bytes, used, capacity_bytes // slot_bytes, self._disks.fullest())


class Collectors:
    """Collects all namespaces of a daemon. For one thread at a time."""

    def __init__(self, namespaces: Callable[[], Sequence[Namespace]]) -> None:
        self._namespaces = namespaces
        self._open: dict[str, _NamespaceCollector] = {}
        self._said: dict[str, str] = {}

    def collect(self) -> Counter[str]:
        """One step in each namespace whose lease is ours or free; blocks that were evicted, by reason.

        A namespace that cannot be read or written is logged once, and keeps no other from being collected.
        """
        namespaces = {namespace.name: namespace for namespace in self._namespaces()}
        for name, collector in list(self._open.items()):
            if namespaces.get(name) is not collector.namespace:
                self._open.pop(name).close()
                self._said.pop(name, None)
        evicted: Counter[str] = Counter()
        for name, namespace in namespaces.items():
            try:
                evicted.update(self._step(name, namespace))
                self._said.pop(name, None)
            except (OSError, StoreConfigError) as error:
                if self._said.get(name) != str(error):
                    self._said[name] = str(error)
                    _log.warning("namespace %s is not collected: %s: it is tried again", name, error)
        return evicted

    def _step(self, name: str, namespace: Namespace) -> Mapping[str, int]:
        quota = Quota.read(namespace.places.found("quota.json"))
        known = self._open.get(name)
        if quota and (known is None or known.quota != quota):
            if known:
                known.close()
            known = self._open[name] = _NamespaceCollector(namespace, quota)
        return known.step() if known else {}

    def end(self) -> None:
        """Let a step that another thread is in end soon."""
        for collector in list(self._open.values()):
            collector.end()

    def close(self) -> None:
        """Leave all namespaces to others."""
        while self._open:
            self._open.popitem()[1].close()
