"""What a store counts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Lock


class Miss(StrEnum):
    """Why a block that was asked for was not loaded. Reasons found in the slot itself have the names of `Flaw`."""

    ABSENT = "absent"
    """Not in the index."""
    LENGTH = "length"
    """The stored block is of another length than the buffer."""
    TIMEOUT = "timeout"
    """Its deadline passed before the read began."""
    ERROR = "error"
    """The disk said so."""
    BREAKER = "breaker"
    """Not tried, for the disk keeps failing."""


class Drop(StrEnum):
    """Why a block was not stored."""

    FULL = "full"
    """Over the hard watermark, or no slot is free and no slab can be made."""
    QUEUE = "queue"
    """Too many bytes under way."""
    TIMEOUT = "timeout"
    """Its deadline passed before the write began."""
    ERROR = "error"
    """The disk said so."""
    BREAKER = "breaker"
    """Not tried, for the disk keeps failing."""
    LENGTH = "length"
    """Longer than a slot holds, or empty."""
    LEASE = "lease"
    """Another process has taken this writer's identity over."""
    READ_ONLY = "read_only"


@dataclass(frozen=True)
class Stats:
    """Counts since open, and a few states of now."""

    hits: int
    misses: Mapping[str, int]
    """Blocks by reason: `Miss` and `Flaw`."""
    stores: int
    duplicates: int
    """Puts of blocks that were there already."""
    dropped: Mapping[str, int]
    """Blocks by reason: `Drop`."""
    evicted: Mapping[str, int]
    """Blocks that this process collected, by reason: `Eviction.reason`."""
    unknown_classes: int
    """Puts and touches with a class that has no time to live: they got the default one."""
    bytes_loaded: int
    bytes_stored: int
    seconds_loading: float
    """Sum over read calls, checks included: above the time that passed when several ran at once."""
    seconds_storing: float
    """Sum over write calls, checksums included."""
    queue_depth: int
    """Read and write calls waiting for a thread."""
    inflight_bytes: int
    """Bytes of puts under way."""
    used_bytes: int
    """Slots of live blocks in the namespace, all writers."""
    capacity_bytes: int
    degraded_roots: int = 0
    """Roots of an erasure-coded store that are lost, or fail."""
    coded: Mapping[str, int] = field(default_factory=dict)
    """What reads of an erasure-coded store met: the fields of `erasure_counters.Counters`."""


class Counters:
    """The running sums behind `Stats`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sums: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._evicted: Counter[str] = Counter()
        self._seconds_loading = self._seconds_storing = 0.0

    def loaded(self, blocks: int, moved_bytes: int, seconds: float) -> None:
        """Blocks that one read call loaded."""
        with self._lock:
            self._sums.update(hits=blocks, bytes_loaded=moved_bytes)
            self._seconds_loading += seconds

    def stored(self, blocks: int, moved_bytes: int, seconds: float) -> None:
        """Blocks that one write call stored."""
        with self._lock:
            self._sums.update(stores=blocks, bytes_stored=moved_bytes)
            self._seconds_storing += seconds

    def duplicate(self, blocks: int) -> None:
        """Puts of blocks that were there already."""
        with self._lock:
            self._sums["duplicates"] += blocks

    def missed(self, reason: str, blocks: int = 1) -> None:
        """Blocks that were not loaded."""
        with self._lock:
            self._misses[reason] += blocks

    def drop(self, reason: str, blocks: int = 1) -> None:
        """Blocks that were not stored."""
        with self._lock:
            self._dropped[reason] += blocks

    def collected(self, evicted: Mapping[str, int]) -> None:
        """Blocks that were collected, by reason."""
        with self._lock:
            self._evicted.update(evicted)

    def unknown_class(self) -> None:
        """A request whose class is not configured."""
        with self._lock:
            self._sums["unknown_classes"] += 1

    def stats(self, *, queue_depth: int, inflight_bytes: int, used_bytes: int, capacity_bytes: int) -> Stats:
        """The sums now."""
        with self._lock:
            return Stats(
                hits=self._sums["hits"],
                misses=dict(self._misses),
                stores=self._sums["stores"],
                duplicates=self._sums["duplicates"],
                dropped=dict(self._dropped),
                evicted=dict(self._evicted),
                unknown_classes=self._sums["unknown_classes"],
                bytes_loaded=self._sums["bytes_loaded"],
                bytes_stored=self._sums["bytes_stored"],
                seconds_loading=self._seconds_loading,
                seconds_storing=self._seconds_storing,
                queue_depth=queue_depth,
                inflight_bytes=inflight_bytes,
                used_bytes=used_bytes,
                capacity_bytes=capacity_bytes,
            )
