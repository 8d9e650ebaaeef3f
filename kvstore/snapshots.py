"""Window state at a few positions of a sequence, in host memory: what a prefix hit needs beside the stored blocks.

A snapshot holds the rows of every sliding window of a model, as they were when the sequence was that long. It is large
for what it saves, so it is kept only where a sequence is likely to go on (the end of a prompt and of an answer), only
the newest few of a sequence, and only for minutes. Without one the engine computes the windows again.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic

import blake3
import xxhash

from deepinfer_kvstore.keys import KEY_BYTES, make_key

SNAPSHOT_KEY_BYTES = 32 + KEY_BYTES
DIGEST_BYTES = 16
OVERHEAD_BYTES = 1024
"""What a snapshot costs beside its payload, generously: so that many tiny ones cannot exceed the capacity either."""


def snapshot_key(namespace: bytes, schema: int, block_hash: bytes) -> bytes:
    """The name of the state after the block `block_hash`: namespace digest (32 bytes), then the block's key.

    `schema` says which windows a snapshot holds, in which order and format, as a block's schema does.

    Raises:
        ValueError: a digest or a hash of another length.
    """
    if len(namespace) != 32:
        raise ValueError(f"namespace digest has {len(namespace)} bytes, needs 32: use Descriptor.digest()")
    return namespace + make_key(schema, block_hash)


def digest_of(key: bytes, payload: bytes | memoryview, secret: bytes | None = None) -> bytes:
    """16 bytes over key and payload: xxh3-128, or keyed BLAKE3 where a `secret` (32 bytes) guards against forgery."""
    if secret is not None:
        return blake3.blake3(key, key=secret).update(payload).digest(DIGEST_BYTES)
    hasher = xxhash.xxh3_128(key)
    hasher.update(payload)
    return hasher.digest()


@dataclass
class _Held:
    sequence: bytes
    charged_bytes: int
    expires: float
    payload: bytes | None = None  # until it has been copied
    digest: bytes = b""


@dataclass
class SnapshotStats:
    """Counts since the ring was made, and its size now."""

    capacity_bytes: int
    used_bytes: int = 0
    held: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """stored, hit, absent, expired, corrupt, too_large, evicted, superseded (by newer ones of the sequence)."""


class SnapshotRing:
    """Snapshots in the memory of this process. Thread-safe.

    Never holds more than its capacity, those being copied included: to make room, the least recently used go first,
    which are also the first to expire. A capacity of 0 holds nothing.
    """

    def __init__(
        self,
        capacity_bytes: int = 0,
        *,
        per_sequence: int = 2,
        expiry_seconds: float = 600.0,
        secret: bytes | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`per_sequence`: newest snapshots of one sequence that are kept. `expiry_seconds` slide with each use."""
        self._per_sequence = per_sequence
        self._expiry_seconds = expiry_seconds
        self._secret = secret
        self._clock = clock
        self._lock = Lock()
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # least recently used first
        self._stats = SnapshotStats(capacity_bytes)

    def put(self, key: bytes, payload: bytes | memoryview, sequence: bytes) -> bool:
        """Keep a copy of `payload`; whether it is held. `sequence` names what it is a state of; see `sequence_of`.

        A key that is held already keeps its payload, and is used: same key, same state.
        """
        size = memoryview(payload).nbytes
        with self._lock:
            if self._live(key) is not None:
                self._use(key)
                return True
            held = _Held(sequence, size + OVERHEAD_BYTES, self._clock() + self._expiry_seconds)
            if not self._make_room(held.charged_bytes):
                self._stats.counts["too_large"] += 1
                return False
            self._held[key] = held
            self._stats.used_bytes += held.charged_bytes
        copied = bytes(payload)
        digest = digest_of(key, copied, self._secret)
        with self._lock:
            if self._held.get(key) is not held:
                return False  # pushed out while it was copied
            held.payload, held.digest = copied, digest
            self._stats.counts["stored"] += 1
            self._supersede(sequence)
        return True

    def get(self, key: bytes) -> bytes | None:
        """The payload, verified; None where there is none (any more) that is still what was put."""
        with self._lock:
            held = self._live(key)
            if held is None or held.payload is None:
                self._stats.counts["absent"] += 1
                return None
            self._use(key)
        if digest_of(key, held.payload, self._secret) == held.digest:
            with self._lock:
                self._stats.counts["hit"] += 1
            return held.payload
        with self._lock:
            self._stats.counts["corrupt"] += 1
            if self._held.get(key) is held:
                self._drop(key)
        return None

    def __contains__(self, key: bytes) -> bool:
        """Whether `get` is likely to find it. Verifies nothing."""
        with self._lock:
            held = self._live(key)
            return held is not None and held.payload is not None

    def describe(self, key: bytes) -> tuple[int, bytes, float] | None:
        """(payload bytes, digest, seconds until it expires) of a held snapshot, for a directory."""
        with self._lock:
            held = self._live(key)
            if held is None or held.payload is None:
                return None
            return len(held.payload), held.digest, held.expires - self._clock()

    def sequence_of(self, key: bytes) -> bytes | None:
        """What a held snapshot is a state of: whoever goes on from it puts its own states under the same name."""
        with self._lock:
            held = self._live(key)
            return None if held is None else held.sequence

    def stats(self) -> SnapshotStats:
        """A copy."""
        with self._lock:
            stats = self._stats
            return SnapshotStats(stats.capacity_bytes, stats.used_bytes, len(self._held), stats.counts.copy())

    def _live(self, key: bytes) -> _Held | None:
        held = self._held.get(key)
        if held is not None and held.expires <= self._clock():
            self._stats.counts["expired"] += 1
            self._drop(key)
            return None
        return held

    def _use(self, key: bytes) -> None:
        self._held.move_to_end(key)
        self._held[key].expires = self._clock() + self._expiry_seconds

    def _drop(self, key: bytes) -> None:
        self._stats.used_bytes -= self._held.pop(key).charged_bytes

    def _make_room(self, wanted_bytes: int) -> bool:
        if wanted_bytes > self._stats.capacity_bytes:
            return False
        while self._stats.used_bytes + wanted_bytes > self._stats.capacity_bytes:
            oldest = next(iter(self._held))
            if self._live(oldest) is not None:
                self._drop(oldest)
                self._stats.counts["evicted"] += 1
        return True

    def _supersede(self, sequence: bytes) -> None:
        copied = ((key, held) for key, held in self._held.items() if held.payload is not None)
        of_sequence = [key for key, held in copied if held.sequence == sequence]
        for key in of_sequence[: -self._per_sequence]:
            self._drop(key)
            self._stats.counts["superseded"] += 1
