"""One run of the prefill model, named by what varies: policy, engines, chunks, load, traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from deepinfer_costmodel.cost import Cost
from deepinfer_router.prefill_config import PrefillConfig
from deepinfer_simulator.arrivals import shifting, shuffled, weighted
from deepinfer_simulator.chunks import BudgetChunks, Chunking, FixedChunks, WholePrompts
from deepinfer_simulator.prefill_model import COST, PrefillModel
from deepinfer_simulator.prefill_policies import BASELINES, Chooser, context_length_aware, routers_own
from deepinfer_simulator.prefill_stats import EDGES, PrefillStats, statistics
from deepinfer_simulator.traces import TraceRequest

ROUTER = "router"
"""The router's own policy, as a name."""
LABELS = "context-length-aware"
POLICIES = (ROUTER, *BASELINES, LABELS)
CHUNKS: dict[str, Chunking] = {"fixed": FixedChunks(), "budget": BudgetChunks(), "whole": WholePrompts()}
SHIFT_TOKENS, SHIFT_FACTOR, SHIFT_PERIOD_S = 65_536, 4.0, 300.0
"""Shifting traffic: prompts of 64K and more come four times as often in every second five minutes."""


@dataclass(frozen=True)
class PrefillCase:
    """What is simulated."""

    policy: str = ROUTER
    engines: int = 16
    ranks: int = 4
    chunks: str = "fixed"
    load: float = 0.65
    """Of what all ranks could compute, if none ever waited for another."""
    seconds: float = 1500.0
    shift: bool = False
    config: PrefillConfig | None = None
    """Of the router's policy; None: its defaults."""
    cost: Cost = COST

    def run(self, trace: Sequence[TraceRequest], seed: int) -> PrefillStats:
        """Simulate it. `trace`: with its hits, see `traces.with_hits`. Raises ValueError where no prompt comes."""
        rng = Random(seed)  # of arrivals alone: a seed's are the same for every policy
        model = PrefillModel(self.engines, self.ranks, CHUNKS[self.chunks], self.cost)
        chooser = self._chooser(model)
        capacity = self.load * self.engines * self.ranks
        if self.shift:
            weight = shifting(SHIFT_TOKENS, SHIFT_FACTOR, SHIFT_PERIOD_S)
            calm, shifted = (self._mean(trace, [weight(r, start) for r in trace]) for start in (0.0, SHIFT_PERIOD_S))
            rate = capacity / fmean((calm, shifted))
            arrivals = weighted(trace, rate, self.seconds, rng, weight, SHIFT_PERIOD_S)
        else:
            arrivals = shuffled(trace, capacity / self._mean(trace, [1.0] * len(trace)), self.seconds, rng)
        run = model.run(arrivals, chooser.policy, Random(f"policy {seed}"), chooser.arrive)
        return statistics(run, self.seconds, chooser.moves())

    def _chooser(self, model: PrefillModel) -> Chooser:
        if self.policy == ROUTER:
            return routers_own(self.config or PrefillConfig.model_validate({}), self.cost)
        if self.policy == LABELS:
            return Chooser(context_length_aware(model.targets, EDGES))
        return Chooser(BASELINES[self.policy]())

    def _mean(self, trace: Sequence[TraceRequest], weights: Sequence[float]) -> float:
        """Seconds that a prompt takes alone."""
        seconds = (self.cost.seconds(r.input_tokens - r.hit_tokens, r.hit_tokens) for r in trace)
        return sum(weight * spent for weight, spent in zip(weights, seconds, strict=True)) / sum(weights)
