"""`place` as a policy of vLLM's EPLB: one rank decides, the others hear what.

vLLM gives a policy sums over its window, already added up over all ranks. Loads step by step come beside them, from
`balancer`; where there are none, sums are one step.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from deepinfer_vllm.eplb.agreement import Agreement
from deepinfer_vllm.eplb.errors import EplbError
from deepinfer_vllm.eplb.moe_lb import replica_counts
from deepinfer_vllm.eplb.policy import place, prepare
from deepinfer_vllm.eplb.stats import BalanceStats

logger = logging.getLogger("vllm.deepinfer")


class StepPolicy:
    """The policy of one engine's state, called in its place: `state.policy` needs no more than this one method.

    Called by the thread that runs the model or, if EPLB is asynchronous, by vLLM's EPLB thread.
    """

    def __init__(
        self, next_counts: Callable[[], Any], max_moves: int | None, agreement: Agreement, stats: BalanceStats
    ) -> None:
        """next_counts: [T, L, E] for the coming call, None if there are none.

        Compiles what the first rank decides with, before there is anything to serve.
        """
        self._next_counts, self._max_moves = next_counts, max_moves
        self._agreement, self._stats = agreement, stats
        self._said = False
        if agreement.is_first:
            prepare()

    def rebalance_experts(
        self,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """vLLM's hook: loads [L, E] to the logical expert of each slot, [L, num_replicas] int64.

        What goes wrong keeps the placement there is: it never ends the engine.
        """
        counts, old = self._next_counts(), old_global_expert_indices
        placed = _as_it_is(old, num_replicas, weight.shape)
        if self._agreement.is_first and bool(weight.any()):  # without any load, as in profiling, there is no choice
            if counts is None and not self._said:
                self._said = True
                logger.warning("EPLB places experts by sums over its window: loads by step are not known here.")
            try:
                placed = decide(counts, weight, num_replicas, num_nodes, num_ranks, old, self._max_moves)
            except Exception:
                logger.exception("EPLB could not place experts; they stay where they are.")
                self._stats.count("failed_decisions", 1)
        return self._agreement.decided(placed)


def decide(
    counts: Any,
    weight: torch.Tensor,
    physical: int,
    nodes: int,
    ranks: int,
    old: torch.Tensor | None,
    max_moves: int | None,
) -> torch.Tensor:
    """The placement [L, physical] int64 for counts [T, L, E], or for sums weight [L, E] where those do not fit.

    Raises EplbError.
    """
    if counts is None or counts.shape[1:] != tuple(weight.shape) or not counts.any():
        counts = weight.unsqueeze(0).numpy()
    current = None
    if old is not None and old.shape == (len(weight), physical) and bool((old >= 0).all()):
        current = old.numpy().astype(np.int32)
    placed = place(counts, ranks, physical, nodes=nodes, current=current, max_moves=max_moves)
    if placed.shape != (len(weight), physical) or not replica_counts(placed, weight.shape[1]).all():
        raise EplbError(f"a placement {list(placed.shape)} leaves an expert out; wanted all of {list(weight.shape)}")
    return torch.from_numpy(placed.astype(np.int64))


def _as_it_is(old: torch.Tensor | None, physical: int, shape: torch.Size) -> torch.Tensor:
    """The placement there is; where slots were added or taken, experts in turn."""
    layers, experts = shape
    if old is not None and old.shape == (layers, physical) and bool((old >= 0).all()):
        return old.to(torch.int64, copy=True)
    return (torch.arange(physical) % experts).expand(layers, physical).contiguous()
