"""The loads of the last steps, step by step, of one model on one rank.

vLLM keeps a window too, but each rank moves on in its own by the steps in which it had tokens, so steps of different
ranks do not stand beside each other there. Here every step has its row on every rank; one without tokens is zero.
"""

import torch


class StepCounts:
    """Rings over `steps` steps, on the device of what is added. For the thread that runs the model."""

    def __init__(self, steps: int, experts: int, local_slots: int) -> None:
        """`experts` are logical; each rank holds `local_slots` of the physical ones."""
        self.steps, self.experts, self.local_slots = steps, experts, local_slots
        self.added = 0
        """Steps since the start, or since the number of slots changed."""
        self._experts_loads = self._rank_loads = torch.empty(0)

    def add(self, load: torch.Tensor, placement: torch.Tensor) -> None:
        """One step's tokens of each slot, load [L, P] integers, under placement [L, P]: each slot's logical expert.

        A placement of -1, an empty slot of an engine that grows, has no load.
        """
        layers, slots = load.shape
        ranks = slots // self.local_slots
        if self._rank_loads.shape[1:] != (layers, ranks):
            self._experts_loads = load.new_zeros((self.steps, layers, self.experts), dtype=torch.int32)
            self._rank_loads = load.new_zeros((self.steps, layers, ranks), dtype=torch.int32)
            self.added = 0
        row = self.added % self.steps
        load = load.to(torch.int32)
        self._experts_loads[row].zero_().scatter_add_(1, placement.clamp(min=0).long(), load * (placement >= 0))
        torch.sum(load.unflatten(1, (ranks, self.local_slots)), dim=-1, dtype=torch.int32, out=self._rank_loads[row])
        self.added += 1

    def expert_loads(self, steps: int) -> torch.Tensor:
        """A copy of the last min(steps, added) steps, oldest first: [T, L, E] int32."""
        return self._last(self._experts_loads, steps)

    def rank_loads(self, steps: int) -> torch.Tensor:
        """The same by the rank that computed: [T, L, ranks] int32."""
        return self._last(self._rank_loads, steps)

    def _last(self, ring: torch.Tensor, steps: int) -> torch.Tensor:
        count = min(steps, self.added, self.steps)
        rows = torch.arange(self.added - count, self.added, device=ring.device) % self.steps
        return ring[rows]
