"""The store as the tier below the host rows: what leaves for it, what comes back, and what it knows of a prompt.

Nothing here waits for a disk: lookups read the local index, transfers run on the store's threads.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from deepinfer_kvstore.descriptor import Descriptor
from deepinfer_kvstore.keys import Key, make_key
from deepinfer_kvstore.network_fs import file_system_type, is_network
from deepinfer_kvstore.store import Put, Store
from deepinfer_kvstore.transfer import Transfer
from deepinfer_vllm.kv_connector.config import ConnectorConfig
from deepinfer_vllm.kv_connector.metrics import TierMetrics, metric_definitions
from deepinfer_vllm.kv_connector.request import Prefix, Wishes, refused

logger = init_logger("vllm." + __name__)

SHUTDOWN_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class _Job:
    job: TransferJob
    keys: list[OffloadKey]
    transfer: Transfer


class StoreTier(SecondaryTierManager):
    """Runs in the scheduler's process, on its thread."""

    medium = Medium.STORAGE

    def __init__(self, *args: Any, descriptor: str, schemas: dict[int, int], **kwargs: Any) -> None:
        """Open the store. `descriptor` is the JSON of the namespace, `schemas` has its ids by vLLM's group.

        Raises:
            StoreConfigError: the store cannot be opened as configured.
        """
        super().__init__(*args, **kwargs)
        config = ConnectorConfig.parse(self._offloading_spec.extra_config)
        self.descriptor = Descriptor.from_json(descriptor, "the engine's layout")
        """Of the store's namespace."""
        self._groups = {group.schema: group for group in self.descriptor.groups}
        self._schemas = schemas
        self._store = Store.open(config.root, self.descriptor, config.store_options())
        shared = is_network(file_system_type(Path(config.root)))
        self.locality = Locality.REMOTE if shared else Locality.LOCAL
        self._rows: memoryview = self._primary_kv_view.cast("B")
        self._loads: dict[int, _Job] = {}
        self._stores: dict[int, _Job] = {}
        self._done: deque[int] = deque()
        """Jobs whose transfer has ended; appended to by the store's threads."""
        self._awaited: dict[str, bool] = {}
        """Requests whose stores someone waits for: whether all of them have been submitted."""
        self._events: list[OffloadingEvent] = []
        self._metrics = TierMetrics()
        self.unstored: set[OffloadKey] = set()
        """Keys in host rows that were dropped: offered again by the next request that has them."""
        self.captive: set[OffloadKey] = set()
        """Keys of loads past their deadline: their rows cannot be given to anyone before the disk answers."""
        logger.info(
            "KV store at %s: namespace %s, %d-byte blocks", config.root, self.descriptor.directory, self._payload_bytes
        )

    @property
    def _payload_bytes(self) -> int:
        return self.descriptor.payload_bytes

    # -- what is there

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Read the request's wishes."""
        wishes = Wishes.read(req_context.kv_transfer_params, self._store.options.retention.numbers)
        req_context.set_state(wishes)
        self._metrics.ignored_params += wishes.ignored
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """From the local index, once for a request: all of a group that needs its whole prefix, else this key."""
        prefix = Prefix.of(req_context)
        there = prefix.found.get(key)
        if there is None:
            there = self._look(key, prefix)
        return LookupResult.HIT if there else LookupResult.MISS

    def _look(self, key: OffloadKey, prefix: Prefix) -> bool:
        group = get_offload_group_idx(key)
        schema = self._schemas[group]
        if not self._is_whole(group) or key not in prefix.places:
            prefix.found[key] = there = self._store.contains([self._store_key(key)])[0]
            return there
        asked = prefix.keys[group][prefix.places[key] :]
        count = self._store.longest_prefix([self._store_key(each) for each in asked])
        prefix.found.update((each, number < count) for number, each in enumerate(asked))
        if schema == self.descriptor.groups[0].schema:
            tokens = self._groups[schema].tokens_per_block
            prefix.absent_tokens += (len(asked) - count) * tokens
        return count > 0

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Let what the request has used live on, blocks that it found in the engine's own memory included."""
        prefix = Prefix.of(req_context)
        self._metrics.absent_tokens += prefix.absent_tokens
        used = [key for group, keys in prefix.keys.items() if self._is_whole(group) for key in keys]
        used += [key for key, there in prefix.found.items() if there and not self._is_whole(get_offload_group_idx(key))]
        self._store.touch([self._store_key(key) for key in used], self._wishes(req_context).ttl_class)
        if req_context.req_id in self._awaited:
            self._awaited[req_context.req_id] = True

    def await_stores(self, request_id: str) -> None:
        """Remember a request that ends, for `stores_ended`."""
        self._awaited[request_id] = False

    def stores_ended(self, request_id: str) -> bool:
        """Whether every block of an awaited request is in the store, or will not be."""
        under_way = (each.job.req_context.req_id for each in self._stores.values() if not each.transfer.done())
        if not self._awaited[request_id] or request_id in under_way:
            return False
        self.forget_stores(request_id)
        return True

    def forget_stores(self, request_id: str) -> None:
        """Wait for a request no longer."""
        del self._awaited[request_id]

    # -- transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Hand rows to the store; what it has no room or time for is dropped at once."""
        request, prefix = job_metadata.req_context, Prefix.of(job_metadata.req_context)
        wishes = self._wishes(request)
        # vLLM hands over a set. Neighbours in a prompt become neighbours on the disk, and are read in one piece.
        rows = dict(zip(job_metadata.keys, job_metadata.chunk_ids, strict=True))
        keys = sorted(rows, key=lambda key: (get_offload_group_idx(key), prefix.places.get(key, 0)))
        puts = []
        for key in keys:
            parent = prefix.parent(key)
            puts.append(
                Put(
                    self._store_key(key),
                    self._row(rows[key]),
                    parent=get_offload_block_hash(parent)[:8] if parent is not None else bytes(8),
                    depth=request.get_offload_key_position(key) or 0,
                )
            )
        transfer = self._store.put(puts, ttl_class=wishes.ttl_class or "", tenant=wishes.tenant)
        self._start(self._stores, _Job(job_metadata, keys, transfer))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Have rows filled by the store."""
        keys = list(job_metadata.keys)
        rows = [self._row(row) for row in job_metadata.chunk_ids]
        transfer = self._store.get([self._store_key(key) for key in keys], rows)
        self._start(self._loads, _Job(job_metadata, keys, transfer))

    def _start(self, jobs: dict[int, _Job], job: _Job) -> None:
        job_id = job.job.job_id
        jobs[job_id] = job
        job.transfer.when_done(lambda _: self._done.append(job_id))

    def get_finished_jobs(self) -> Iterator[JobResult]:
        """Jobs whose rows are nobody's but the manager's again."""
        while self._done:
            job_id = self._done.popleft()
            if (load := self._loads.pop(job_id, None)) is not None:
                yield self._loaded(load)
            else:
                yield self._stored(self._stores.pop(job_id))
        for job in self._loads.values():
            if job.transfer.overdue():
                self._give_up(job)

    def _loaded(self, job: _Job) -> JobResult:
        results = job.transfer.results()
        self.captive.difference_update(job.keys)
        good = [key for key, ok in zip(job.keys, results, strict=True) if ok]
        refused(job.job.req_context).update(key for key, ok in zip(job.keys, results, strict=True) if not ok)
        self._count_tokens(job.keys, results)
        return _result(job, good)

    def _stored(self, job: _Job) -> JobResult:
        results = job.transfer.results()
        good = [key for key, ok in zip(job.keys, results, strict=True) if ok]
        if not self._store.options.read_only:
            self.unstored.update(key for key, ok in zip(job.keys, results, strict=True) if not ok)
        # Should the request be preempted, it finds them there.
        Prefix.of(job.job.req_context).found.update(dict.fromkeys(good, True))
        if good and self._offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events.append(OffloadingEvent(good, Medium.STORAGE, False, self.locality, self.tier_type))
        return _result(job, good)

    def _give_up(self, job: _Job) -> None:
        """Let requests go on without what a disk does not bring; the rows wait for it."""
        if not self.captive.issuperset(job.keys):
            late = self._store.options.io_timeout_s
            logger.warning("KV store: %d blocks not read within %.1f s: computed instead", len(job.keys), late)
            self._metrics.overdue_blocks += len(job.keys)
            self.captive.update(job.keys)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that have become visible in the store."""
        events, self._events = self._events, []
        return events

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark blocks as used."""
        self._store.touch([self._store_key(key) for key in keys], self._wishes(req_context).ttl_class)

    def drain_jobs(self) -> None:
        """Wait for every transfer, as vLLM asks when it resets the host rows."""
        for job in (*self._loads.values(), *self._stores.values()):
            job.transfer.wait()
        while len(self._done) < len(self._loads) + len(self._stores):
            sleep(0.0001)  # who waits is woken before the transfer's thread has told us

    def shutdown(self) -> None:
        """Close the store.

        Raises:
            TimeoutError: a disk still holds rows, which must not be unmapped.
        """
        deadline = monotonic() + SHUTDOWN_GRACE_SECONDS
        stuck = [
            job
            for job in (*self._loads.values(), *self._stores.values())
            if not job.transfer.wait(max(0.0, deadline - monotonic()))
        ]
        self._store.close()
        if stuck:
            raise TimeoutError(f"the KV store's disk has not answered {len(stuck)} transfers: host memory stays mapped")

    # -- metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Names and help of the tier's metrics."""
        return metric_definitions()

    def get_stats(self) -> Any:
        """What has been counted since the last call."""
        return self._metrics.take(self._store.stats())

    def _count_tokens(self, keys: list[OffloadKey], results: list[bool]) -> None:
        """Of the first group only: groups overlap in the tokens that they cover."""
        first = self.descriptor.groups[0]
        for key, ok in zip(keys, results, strict=True):
            if self._schemas[get_offload_group_idx(key)] == first.schema:
                if ok:
                    self._metrics.hit_tokens += first.tokens_per_block
                else:
                    self._metrics.failed_tokens += first.tokens_per_block

    # -- names

    def _is_whole(self, group: int) -> bool:
        """Whether a hit needs all blocks of a group, and not only those under its window."""
        return self._groups[self._schemas[group]].window_tokens is None

    def _store_key(self, key: OffloadKey) -> Key:
        return make_key(self._schemas[get_offload_group_idx(key)], get_offload_block_hash(key))

    def _row(self, number: Any) -> memoryview:
        """A host row without the bytes that round it up to a page."""
        start = int(number) * self.block_size_bytes
        return self._rows[start : start + self._payload_bytes]

    def _wishes(self, request: ReqContext) -> Wishes:
        return request.get_state(Wishes) or Wishes()


def _result(job: _Job, good: list[OffloadKey]) -> JobResult:
    return JobResult(
        job.job.job_id,
        success=len(good) == len(job.keys),
        successful_keys=good,
        transfer_time=job.transfer.seconds,
        transfer_bytes=job.transfer.bytes_moved,
    )
