"""The connector's own metrics, `vllm:deepinfer_kv_*`, in the form of vLLM's offload stack."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from deepinfer_kvstore.stats import Stats

PREFIX = "vllm:deepinfer_kv_"
COUNTERS = {
    "hit_tokens": ("Prompt tokens whose KV was loaded from the store.", ()),
    "miss_tokens": (
        "Prompt tokens that the store had not: absent, or failed where it had them and could not bring them.",
        ("reason",),
    ),
    "miss_blocks": ("Blocks that were asked for and not loaded, by the store's reason.", ("reason",)),
    "overdue_blocks": ("Blocks whose load passed its deadline: computed instead.", ()),
    "checksum_failures": ("Blocks whose stored bytes were not what was written.", ()),
    "dropped_blocks": ("Blocks that were not stored, by the store's reason.", ("reason",)),
    "load_bytes": ("Payload bytes read from the store.", ()),
    "load_seconds": ("Seconds spent in reads and checks, summed over threads.", ()),
    "store_bytes": ("Payload bytes written to the store.", ()),
    "store_seconds": ("Seconds spent in writes and checksums, summed over threads.", ()),
    "coded": (
        "What reads of an erasure-coded store met: extra_roots, bad_shards, computed_shards and others.",
        ("what",),
    ),
    "ignored_params": ("Values of kv_transfer_params.kvstore that were no such thing.", ()),
    "snapshots": (
        "Snapshots of windows by what became of them: stored, hit, fetched, evicted, corrupt, ...",
        ("event",),
    ),
    "handovers": ("Prompts handed over too late: the answer was not kept longer, or blocks not awaited.", ("event",)),
}
GAUGES = {
    "queue_depth": "Reads and writes waiting for a thread of the store.",
    "used_bytes": "Bytes of live blocks in the namespace, all engines together.",
    "capacity_bytes": "Bytes that the namespace may take.",
    "degraded_roots": "Roots of an erasure-coded store that are lost or fail.",
}


def metric_definitions() -> dict[str, Any]:
    """Help and labels by name."""
    counters = {
        PREFIX + name: OffloadingCounterMetadata(documentation=text, labelnames=labels)
        for name, (text, labels) in COUNTERS.items()
    }
    return counters | {PREFIX + name: OffloadingGaugeMetadata(documentation=text) for name, text in GAUGES.items()}


Sums = dict[tuple[str, tuple[str, ...]], float]
"""Totals since the start, by name and labels."""


class Growth:
    """What totals have grown by since they were last reported."""

    def __init__(self) -> None:
        self._reported: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def take(self, sums: Sums) -> OffloadingConnectorStats:
        """In vLLM's form."""
        stats = OffloadingConnectorStats()
        for (name, labels), total in sums.items():
            if grown := total - self._reported[name, labels]:
                self._reported[name, labels] = total  # type: ignore[assignment]
                stats.increase_counter(PREFIX + name, grown, labels)
        return stats


@dataclass
class TierMetrics:
    """What the tier counts itself; the rest comes from the store's own counts."""

    hit_tokens: int = 0
    absent_tokens: int = 0
    failed_tokens: int = 0
    overdue_blocks: int = 0
    ignored_params: int = 0
    _growth: Growth = field(default_factory=Growth)

    def take(self, store: Stats) -> OffloadingConnectorStats:
        """What has been added since the last call, in vLLM's form."""
        sums: Sums = {
            ("hit_tokens", ()): self.hit_tokens,
            ("miss_tokens", ("absent",)): self.absent_tokens,
            ("miss_tokens", ("failed",)): self.failed_tokens,
            ("overdue_blocks", ()): self.overdue_blocks,
            ("ignored_params", ()): self.ignored_params,
            ("checksum_failures", ()): store.misses.get("checksum", 0),
            ("load_bytes", ()): store.bytes_loaded,
            ("load_seconds", ()): store.seconds_loading,
            ("store_bytes", ()): store.bytes_stored,
            ("store_seconds", ()): store.seconds_storing,
            **{("miss_blocks", (str(reason),)): count for reason, count in store.misses.items()},
            **{("coded", (what,)): count for what, count in store.coded.items()},
            **{("dropped_blocks", (str(reason),)): count for reason, count in store.dropped.items()},
        }
        stats = self._growth.take(sums)
        for name in GAUGES:
            stats.set_gauge(PREFIX + name, getattr(store, name))
        return stats
