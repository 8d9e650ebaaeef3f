"""What the operators' commands say of a namespace, as JSON has it. Times are Unix milliseconds, keys are hex."""

import os
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.header import Seal
from deepinfer_kvstore.inspection import Inspector, Orphan
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.namespaces import Namespace
from deepinfer_kvstore.opening import Places, stored_slot_bytes
from deepinfer_kvstore.operators import ages, disk_bytes, leases
from deepinfer_kvstore.retention import ttl_seconds
from deepinfer_kvstore.stripe_set import Stripe

Report = dict[str, Any]
Progress = Callable[[int, int], object]
"""Told how much is done, of how much."""
SHOWN = 20
"""Damaged blocks that are named one by one."""


def named(namespace: Namespace) -> Report:
    """What every report begins with."""
    return {"namespace": namespace.name, "model": namespace.descriptor.model}


def inspector(namespace: Namespace, secret: bytes | None) -> Inspector:
    """Raises:
    StoreConfigError: a secret of the wrong length, no slot size, a root that holds shards.
    """
    root = namespace.directory.parent
    if Stripe.read(root):
        raise StoreConfigError(f"root {root} is one of a stripe set: its slabs hold shards, not blocks")
    places = Places([root], namespace.descriptor)
    seal = Seal(namespace.descriptor.digest(), secret)
    return Inspector(places.slabs, stored_slot_bytes(places), namespace.index, seal, namespace.sync)


def check(namespace: Namespace, secret: bytes | None, sample: int | None, progress: Progress) -> Report:
    """Read every slot, or up to `sample` blocks chosen by chance.

    Raises:
        StoreConfigError: see `inspector`.
        OSError: the slabs cannot be read.
    """
    looking = inspector(namespace, secret)
    damaged: Counter[str] = Counter()
    shown: list[Report] = []
    orphans = 0
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
        "writers": [lease._asdict() for lease in leases(namespace.directory)],
    }


def stats(namespace: Namespace, progress: Progress | None) -> Report:
    """Sums, and with `progress` a histogram of ages, for which every block of the index is looked at.

    Raises:
        StoreConfigError: see `inspector`.
        OSError: the root cannot be read.
    """
    totals = namespace.index.totals()
    places = Places([namespace.directory.parent], namespace.descriptor)
    slot_bytes = stored_slot_bytes(places)
    disk = os.statvfs(namespace.directory)
    writers = leases(namespace.directory)
    report = {
        **named(namespace),
        "keys": totals.keys,
        "bytes": totals.bytes,
        "slot_bytes": slot_bytes,
        "slots_used": totals.slots,
        "slots": sum(path.stat().st_size for path in places.slabs.glob("*.slab")) // slot_bytes,
        "slab_disk_bytes": disk_bytes(places.slabs, "*.slab"),
        "journal_bytes": disk_bytes(namespace.directory / "journals", "*.log"),
        "disk_bytes": disk.f_blocks * disk.f_frsize,
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
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
