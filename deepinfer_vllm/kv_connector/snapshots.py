"""Snapshots of windows: taken where a turn ends, and loaded where a later request goes on from there.

Without one, vLLM computes the window before a prefix hit again: a little work, and an approximation, since the first of
those tokens do not see theirs. With one the windows are what they were. Runs on the scheduler's thread; no I/O here.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any

from deepinfer_kvstore.snapshot_exchange import SnapshotExchange
from deepinfer_kvstore.snapshot_server import MAX_KEYS
from deepinfer_kvstore.snapshots import SnapshotRing, snapshot_key
from deepinfer_vllm.kv_connector.windows import Blocks, Capture, Restore, WindowPlan, Windows

SCHEMA = 0
"""The namespace of snapshots already tells their layout."""


@dataclass
class _Tracked:
    boundary: int = 0
    """Where the snapshot lies that the request loads or has loaded; 0: none."""
    payload: bytes | None = None
    whole_from: int | None = None
    """Position from which on every window row has been written, as far as can be known here."""
    refused: bool = False
    search: "Future[bool] | None" = None
    """For a snapshot of another node."""
    wait_until: float = 0.0


class SnapshotScheduler:
    """Which snapshots are taken and loaded. `Windows.groups` must be non-empty."""

    def __init__(
        self,
        windows: Windows,
        ring: SnapshotRing,
        namespace: bytes,
        hash_tokens: int,
        *,
        exchange: SnapshotExchange | None = None,
        wait_seconds: float = 0.0,
    ) -> None:
        """`namespace`: digest of the store's descriptor. `hash_tokens`: of one of a request's block hashes.

        `exchange` brings other nodes' snapshots, for which a request waits `wait_seconds` at most.
        """
        self._windows = windows
        self._exchange = exchange
        self._wait_seconds = wait_seconds
        self._ring = ring
        self._namespace = windows.digest(namespace)
        self._hash_tokens = hash_tokens
        self._requests: dict[str, _Tracked] = {}
        self._plan = WindowPlan()
        self._sequences: dict[bytes, bytes] = {}

    def kept_longer(self) -> dict[int, int]:
        """For how many tokens windows, by group, must outlive theirs: until the next boundary."""
        return {group.group: self._windows.interval_tokens for group in self._windows.groups}

    def begin(self, request: Any) -> None:
        """A request has come: ask other nodes for the snapshot that is the nearest to its end."""
        if self._exchange is None:
            return
        interval = self._windows.interval_tokens
        last = min(request.num_tokens - 1, len(request.block_hashes) * self._hash_tokens) // interval * interval
        boundaries = range(last, 0, -interval)[:MAX_KEYS]
        wanted = []
        for boundary in boundaries:
            key = self._key(request, boundary)
            if key in self._ring:
                break
            wanted.append((key, self._windows.payload_bytes(boundary)))
        if wanted:
            search = self._exchange.search(wanted)
            self._requests[request.request_id] = _Tracked(search=search, wait_until=monotonic() + self._wait_seconds)

    def waits(self, request_id: str) -> bool:
        """Whether another node's snapshot may still come in time."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.search is None:
            return False
        return not tracked.search.done() and monotonic() < tracked.wait_until

    def choose(self, request: Any, computed: int, hit: int) -> int | None:
        """Where to end a hit of `hit` tokens, `computed` of them in the engine already, so that a snapshot fits it.

        None: no snapshot is near enough, and windows are computed again.
        """
        tracked = self._requests.setdefault(request.request_id, _Tracked())
        tracked.boundary, tracked.payload = 0, None
        if tracked.refused:
            return None
        interval = self._windows.interval_tokens
        boundary: int = min(hit, request.num_tokens - 1) // interval * interval
        while boundary > computed and hit - boundary <= self._windows.window_tokens:
            key = self._key(request, boundary)
            payload = self._ring.get(key) if key in self._ring else None
            if payload is not None and len(payload) == self._windows.payload_bytes(boundary):
                tracked.boundary, tracked.payload = boundary, payload
                return boundary
            boundary -= interval
        return None

    def loads(self, request_id: str) -> bool:
        """Whether the windows of a request come from a snapshot."""
        tracked = self._requests.get(request_id)
        return tracked is not None and tracked.boundary > 0

    def forget(self, request_id: str) -> None:
        """Take back what `choose` said last."""
        tracked = self._requests[request_id]
        tracked.boundary, tracked.payload = 0, None

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external_tokens: int) -> None:
        """The request has blocks for what `choose` found, or is given no external tokens (of ours)."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.payload is None:
            return
        if external_tokens == 0:
            tracked.boundary, tracked.payload = 0, None
            return
        blocks = self._blocks(block_ids, tracked.boundary) or ()  # none would be a failed load
        self._plan.restores.append(Restore(request.request_id, blocks, tracked.payload))
        tracked.payload = None

    def scheduled(self, scheduler_output: Any) -> None:
        """Note which window rows a step writes: of a chunk, a model may skip all but the last window."""
        counts = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for new in scheduler_output.scheduled_new_reqs:
            self._begins(new.req_id, new.num_computed_tokens)
            self._advances(new.req_id, new.num_computed_tokens, counts[new.req_id])
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                self._begins(request_id, computed)
            self._advances(request_id, computed, counts[request_id])

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> bool:
        """Whether a snapshot is to be taken of a request that ends, and its blocks are to be kept until it is."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None or tracked.whole_from is None:
            return False
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        boundary = computed // self._windows.interval_tokens * self._windows.interval_tokens
        if boundary == 0 or max(0, boundary - self._windows.window_tokens) < tracked.whole_from:
            return False
        blocks = self._blocks(block_ids, boundary)
        if blocks is None or len(request.block_hashes) * self._hash_tokens < boundary:
            return False
        key = self._key(request, boundary)
        if key in self._ring or key in self._sequences:
            return False
        self._sequences[key] = self._sequence(request, boundary) or key
        self._plan.captures.append(Capture(request.request_id, key, blocks))
        return True

    def take_plan(self) -> WindowPlan | None:
        """What the ranks have to do since this was last asked; None: nothing."""
        for tracked in self._requests.values():
            if tracked.payload is not None:  # found, but no room for its request in this step
                tracked.boundary, tracked.payload = 0, None
        plan, self._plan = self._plan, WindowPlan()
        return plan if plan.captures or plan.restores else None

    def captured(self, payloads: dict[bytes, bytes]) -> None:
        """Keep what the ranks have taken; what they could not is empty."""
        for key, payload in payloads.items():
            sequence = self._sequences.pop(key, key)
            if payload and self._ring.put(key, payload, sequence) and self._exchange is not None:
                self._exchange.announce(key)

    def failed(self, request_ids: set[str]) -> None:
        """Load no snapshot again for requests whose load failed."""
        for request_id in request_ids:
            if (tracked := self._requests.get(request_id)) is not None and tracked.boundary:
                tracked.refused, tracked.boundary = True, 0

    def pending(self) -> bool:
        """Whether the engine must step on for a snapshot."""
        return bool(self._plan.captures or self._sequences)

    def _begins(self, request_id: str, computed: int) -> None:
        tracked = self._requests.setdefault(request_id, _Tracked())
        loaded = tracked.boundary - self._windows.window_tokens if tracked.boundary else computed
        tracked.whole_from = max(0, min(loaded, computed))

    def _advances(self, request_id: str, computed: int, count: int) -> None:
        tracked = self._requests[request_id]
        shortest = min(group.window_tokens for group in self._windows.groups)
        if count > shortest:
            tracked.whole_from = computed + count - shortest

    def _blocks(self, block_ids: tuple[list[int], ...], boundary: int) -> Blocks | None:
        found = []
        for group in self._windows.groups:
            ids, indices = block_ids[group.group], group.blocks(boundary)
            if len(ids) < indices.stop or not all(ids[index] for index in indices):  # 0: given up already
                return None
            found.append(tuple(ids[index] for index in indices))
        return tuple(found)

    def _key(self, request: Any, boundary: int) -> bytes:
        return snapshot_key(self._namespace, SCHEMA, request.block_hashes[boundary // self._hash_tokens - 1])

    def _sequence(self, request: Any, boundary: int) -> bytes | None:
        """Name of the sequence that the newest earlier snapshot of this request's prefix belongs to."""
        interval = self._windows.interval_tokens
        earlier = range(boundary - interval, 0, -interval)
        names = (self._ring.sequence_of(self._key(request, position)) for position in earlier)
        return next((name for name in names if name is not None), None)
