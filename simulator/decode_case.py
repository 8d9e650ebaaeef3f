"""One run of the decode model, named by what varies: policy, size, replicas, age of views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepinfer_router.decode import DecodePolicy
from deepinfer_router.decode_config import DecodeConfig
from deepinfer_simulator.baselines import (
    Least,
    PowerOf,
    RandomChoice,
    RoundRobin,
    active_and_kv,
    kv_tokens,
    requests,
)
from deepinfer_simulator.baselines_prefix import CacheAware, LMetric
from deepinfer_simulator.decode_model import DecodeResult, decode
from deepinfer_simulator.decode_views import ExactView, PolledViews, Views
from deepinfer_simulator.fleet_views import FleetViews
from deepinfer_simulator.policy import Policy
from deepinfer_simulator.traces import TraceRequest

ROUTER = "router"
"""The router's own policy, as a name."""
_SCORE = active_and_kv(DecodeConfig().kv_weight)
BASELINES: dict[str, Callable[[], Policy]] = {
    "random": RandomChoice,
    "round-robin": RoundRobin,
    "power-of-two": lambda: PowerOf(2, requests),
    "least-requests": lambda: Least(requests),
    "least-kv": lambda: Least(kv_tokens),
    "power-of-two-score": lambda: PowerOf(2, _SCORE),
    "power-of-four-score": lambda: PowerOf(4, _SCORE),
    "least-score": lambda: Least(_SCORE),
    "cache-aware": CacheAware,
    "lmetric": LMetric,
}
"""Rules of others and parts of ours; a score is requests + w * KV tokens."""
POLICIES = (ROUTER, *BASELINES)


@dataclass(frozen=True)
class DecodeCase:
    """What is simulated."""

    policy: str = ROUTER
    ranks: int = 64
    replicas: int = 1
    poll_s: float = 0.2
    """Between polls of the ranks' loads; 0: everyone knows all at once, of baselines only."""
    per_rank: int = 60
    """Requests in flight."""
    steps: int = 2500
    config: DecodeConfig | None = None
    """Of the router's policy; None: its defaults for so many replicas."""

    def run(
        self,
        trace: Sequence[TraceRequest],
        seed: int,
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> DecodeResult:
        """Simulate it."""
        views: Views
        if self.policy == ROUTER:
            views = FleetViews(self.ranks, self.replicas, self.poll_s)
        elif self.poll_s:
            views = PolledViews(self.ranks, self.replicas, self.poll_s)
        else:
            views = ExactView(self.ranks, self.replicas)
        policies = [self._policy() for _ in range(self.replicas)]
        return decode(trace, policies, views, seed, per_rank=self.per_rank, steps=self.steps, progress=progress)

    def _policy(self) -> Policy:
        if self.policy == ROUTER:
            return DecodePolicy(self.config or DecodeConfig(replicas=self.replicas))
        return BASELINES[self.policy]()
