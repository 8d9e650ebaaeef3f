"""What the operators' commands say of a namespace, as JSON has it. Times are Unix milliseconds, keys are hex."""

import os
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from deepinfer_kvstore.bare_namespace import BareNamespace
from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.inspection import Orphan
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.operators import ages, disk_bytes, leases
from deepinfer_kvstore.quota import Quota
from deepinfer_kvstore.retention import ttl_seconds

Report = dict[str, Any]
Progress = Callable[[int, int], object]
"""Told how much is done, of how much."""
SHOWN = 20
"""Damaged blocks that are named one by one."""


def named(namespace: BareNamespace) -> Report:
    """What every report begins with."""
    return {"namespace": namespace.name, "model": namespace.descriptor.model}


def check(namespace: BareNamespace, secret: bytes | None, sample: int | None, progress: Progress) -> Report:
    """Read every slot, or up to `sample` blocks chosen by chance.

    Raises:
        StoreConfigError: a secret of the wrong length.
        OSError: the slabs cannot be read.
    """
    damaged: Counter[str] = Counter()
    shown: list[Report] = []
    orphans = 0
    with namespace.inspector(secret) as looking:
        for found in looking.everything(progress) if sample is None else looking.sample(sample, Random(), progress):
            if isinstance(found, Orphan):
                orphans += 1
                continue
            damaged[found.why] += 1
            if len(shown) < SHOWN:
                shown.append({"key": found.key.hex(), "why": found.why, **found.location._asdict()})
    return {
        **named(namespace),
        "slots_read": looking.read,
        "intact": looking.intact,
        "damaged": dict(damaged),
        "damaged_blocks": shown,
        "orphans": orphans if sample is None else None,
        "writers": [lease._asdict() for lease in leases(namespace.places.writers, shared=namespace.shared)],
    }


def stats(namespace: BareNamespace, progress: Progress | None) -> Report:
    """Sums, and with `progress` a histogram of ages, for which every block of the index is looked at.

    Raises:
        OSError: the root cannot be read.
    """
    totals = namespace.index.totals()
    places = namespace.places
    disks = [os.statvfs(directory) for directory in places.disks]
    writers = leases(namespace.places.writers, shared=namespace.shared)
    quota = Quota.read(places.found("quota.json"))
    report = {
        **named(namespace),
        "keys": totals.keys,
        "bytes": totals.bytes,
        "slot_bytes": namespace.slot_bytes,
        "slots_used": totals.slots,
        "capacity_bytes": quota.capacity_bytes if quota else None,
        "used_bytes": totals.slots * namespace.slot_bytes,
        "slots": sum(namespace.slabs().values()),
        "slab_disk_bytes": disk_bytes(places.disks, "*.slab"),
        "journal_bytes": disk_bytes(places.journals, "*.log"),
        "disk_bytes": sum(disk.f_blocks * disk.f_frsize for disk in disks),
        "disk_free_bytes": sum(disk.f_bavail * disk.f_frsize for disk in disks),
        "tenants": {f"{tag:08x}": _sums(sums) for tag, sums in totals.by_tenant.items()},
        "ttl_seconds": {str(ttl_seconds(number)): _sums(sums) for number, sums in totals.by_ttl.items()},
        "writers_alive": sum(lease.alive for lease in writers),
        "writers_dead": sum(not lease.alive for lease in writers),
    }
    return {**report, "ages": dict(ages(namespace.index, progress))} if progress else report


def block(key: Key, entry: Entry) -> Report:
    """One block of a listing."""
    return {
        "key": key.hex(),
        "bytes": entry.length,
        "tokens": entry.depth,
        "created_ms": entry.created_ms,
        "touched_ms": entry.touched_ms,
        "ttl_seconds": ttl_seconds(entry.ttl_class),
        "tenant": f"{entry.tenant:08x}",
        **entry.location._asdict(),
    }


def _sums(sums: tuple[int, int]) -> dict[str, int]:
    keys, held = sums
    return {"keys": keys, "bytes": held}
