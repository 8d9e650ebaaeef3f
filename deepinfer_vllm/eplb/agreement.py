"""The ranks that share experts, as far as they have to act alike."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed


@dataclass(frozen=True)
class Agreement:
    """Collectives over an engine's expert-parallel ranks: all of them must make the same calls in the same order."""

    device_group: Any
    """For what is measured, called by the thread that runs the model."""
    host_group: Any
    """For decisions, called by whichever thread vLLM balances in; nothing else uses it meanwhile."""

    @property
    def is_first(self) -> bool:
        """Whether the others hear from this rank."""
        return bool(torch.distributed.get_rank(self.host_group) == 0)

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's tensor, in its place."""
        torch.distributed.all_reduce(tensor, group=self.device_group)
        return tensor

    def decided(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first rank's tensor, on the host, in place of everybody's."""
        first = torch.distributed.get_global_rank(self.host_group, 0)
        torch.distributed.broadcast(tensor, src=first, group=self.host_group)
        return tensor

    def any(self, wanted: bool) -> bool:
        """Whether some rank wants it: environments of hosts may differ."""
        flag = torch.tensor([int(wanted)])
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self.host_group)
        return bool(flag.item())
