"""Workers that share counts balance decode as one router does, in the lock-step model of a decode step."""

from pathlib import Path
from typing import Any

import pytest

from deepinfer_router.decode import DecodePolicy
from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.fleet import Fleet
from deepinfer_router.fleet_config import FleetConfig
from deepinfer_router.lease import Lease
from deepinfer_router.roles import Role
from deepinfer_router.shared_counts import SharedCounts
from deepinfer_router.target import Target
from deepinfer_router.work import Work
from deepinfer_simulator.decode_model import decode
from deepinfer_simulator.traces import read

TRACE = Path("benchmarks/traces/mooncake_conversation_trace.jsonl.gz")


class SharedViews:
    """Workers that fold after every third booking of all, about 7 ms apart here, and when a step begins."""

    def __init__(self, ranks: int, workers: int, directory: Path) -> None:
        self.ranks, self.replicas = ranks, workers
        self._now = 0.0
        self._bookings = 0
        self._fleets = [Fleet(FleetConfig(slow_start_s=0), clock=lambda: self._now) for _ in range(workers)]
        self._engines = [fleet.add(EngineSpec("http://engine", ranks=ranks)) for fleet in self._fleets]
        self._counts = [SharedCounts(fleet, directory, lambda: self._now) for fleet in self._fleets if workers > 1]
        self._leases: dict[Lease, None] = {}

    def tick(self, now: float, count: Any, kv: Any) -> None:
        self._now = now
        for lease in self._leases:
            lease.tokens(1)
        self._fold()

    def targets(self, replica: int) -> list[Target]:
        return self._engines[replica].targets

    def book(self, replica: int, target: Target, work: Work) -> Lease:
        lease = self._fleets[replica].book(target, work, Role.DECODE)
        self._leases[lease] = None
        self._bookings += 1
        if self._bookings % 3 == 0:
            self._fold()
        return lease

    def release(self, booking: Lease) -> None:
        del self._leases[booking]
        booking.release()

    def close(self) -> None:
        for counts in self._counts:
            counts.close()

    def _fold(self) -> None:
        for counts in self._counts:
            counts.fold()


@pytest.mark.parametrize("seed", [1, 2])
def test_four_workers_as_one_router(root: Path, tmp_path: Path, seed: int) -> None:
    requests = read(root / TRACE)
    eta = {}
    for workers in (1, 4):
        views = SharedViews(16, workers, tmp_path)
        policies = [DecodePolicy(slow_start_s=0, workers=workers) for _ in range(workers)]
        eta[workers] = decode(requests, policies, views, seed, per_rank=40, steps=450).eta
        views.close()
    assert eta[1] > 0.93
    assert eta[4] > eta[1] - 0.01
