"""The runner's side of leaving drafts out where the host decides which: counts that are true for host and device.

vLLM's runner has a seam for it, "adaptive verification": the scheduler schedules every draft, the runner takes out
those that are not to be verified, and to the scheduler these look rejected. vLLM's own manager decides on the device
and leaves the host with bounds; where the host decides before it prepares a batch, nothing of the runner needs to know
that drafts were left out.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.utils.torch_utils import async_tensor_h2d

Ints: TypeAlias = NDArray[np.int64]
Order = Callable[[dict[str, int], dict[str, list[int]], int], list[str]]


class Trimming:
    """Half of the interface of vLLM's manager. R: requests of the batch, in its order.

    `_drafts` [R] is what a decision about the step has set, before the runner calls these.
    """

    _drafts: Ints

    def __init__(
        self, query_start_loc: torch.Tensor, bonus_tokens: int, order: Order, extra: tuple[None, ...] = ()
    ) -> None:
        """`order` is the runner's order of a batch; `extra` ends what `reallocate_drafts` returns in newer vLLM."""
        self._query_start_loc, self._bonus, self._order, self._extra = query_start_loc, bonus_tokens, order, extra
        self._drafts = np.zeros(0, np.int64)

    def compact_batch(
        self,
        num_draft_tokens_per_req: NDArray[np.int32],
        num_scheduled_tokens: NDArray[np.int32],
        cu_num_logits_np: NDArray[np.int32],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """[R] tokens of each request without the drafts that are left out, and where its logits begin [R + 1]."""
        tokens = num_scheduled_tokens - num_draft_tokens_per_req + self._drafts.astype(np.int32)
        self._first_logits = np.concatenate(([0], np.cumsum(self._drafts + self._bonus))).astype(np.int32)
        return tokens, self._first_logits

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """What the device is told, which the host knew: where logits begin, where tokens begin, and drafts in all."""
        first_logits = async_tensor_h2d(self._first_logits, device=self._query_start_loc.device)
        return first_logits, self._query_start_loc, int(self._drafts.sum()), *self._extra
