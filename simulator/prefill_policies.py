"""Policies for the prefill model by name: the router's own, and the rules of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from deepinfer_costmodel.cost import Cost
from deepinfer_costmodel.table import CostTable
from deepinfer_router.engine_costs import EngineCosts
from deepinfer_router.prefill import PrefillPolicy
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_router.target import Target
from deepinfer_simulator.baselines import Least, PowerOf, RandomChoice, RoundRobin, pending_seconds, requests
from deepinfer_simulator.baselines_prefix import CacheAware, ContextLengthAware, LMetric
from deepinfer_simulator.policy import Policy
from deepinfer_simulator.prefill_model import Arrive


@dataclass(frozen=True)
class Chooser:
    """A policy, what it wants to be told, and how often it has moved engines."""

    policy: Policy
    arrive: Arrive | None = None
    moves: Callable[[], int] = lambda: 0


def routers_own(config: PrefillConfig, cost: Cost) -> Chooser:
    """PrefillPolicy with these settings, and costs that are known. Without a bound on what an engine may have waiting:
    here is no admission, where requests would wait instead."""
    costs = EngineCosts(CostTable({"default": cost}, {"default": "the model's own"}))
    policy = PrefillPolicy(config.model_copy(update={"max_pending_s": None}), costs)
    return Chooser(policy, policy.arrive, lambda: sum(pool.moves for pool in policy.pools.values()))


BASELINES: dict[str, Callable[[], Policy]] = {
    "random": RandomChoice,
    "round-robin": RoundRobin,
    "power-of-two": lambda: PowerOf(2, requests),
    "least-requests": lambda: Least(requests),
    "least-work": lambda: Least(pending_seconds),
    "cache-aware": CacheAware,
    "lmetric": LMetric,
}
"""Those that need nothing but targets."""


def context_length_aware(targets: Sequence[Target], edges: Sequence[int]) -> Policy:
    """Engines labelled once, as evenly as can be, with the ranges between `edges`; what is longer than the last is in
    the last range."""
    ids = list(dict.fromkeys(target.engine.id for target in targets))
    ranges = list(pairwise((0, *edges, 4 * edges[-1])))
    return ContextLengthAware({id: ranges[number * len(ranges) // len(ids)] for number, id in enumerate(ids)})
