"""What became of drafts where every draft is verified, for whoever records it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.listeners import Listens
from deepinfer_vllm.spec_decode.stats import DraftStats


class Watcher:
    """A `Decider` that always drafts, and pairs the confidences of a draft with what the next step makes of it."""

    def __init__(
        self, speculator: Any, bonus_tokens: int, listeners: list[Listens], stats: DraftStats | None = None
    ) -> None:
        self._speculator, self._bonus, self._listeners, self._stats = speculator, bonus_tokens, listeners, stats
        shape = speculator.max_num_reqs, speculator.num_speculative_steps
        self._confidences = np.zeros(shape, np.float32)
        """Of each slot's latest draft."""
        self._sampled: NDArray[np.int64] = np.zeros(0, np.int64)

    def verified(self, num_sampled: torch.Tensor) -> None:
        """See `Decider`."""
        self._sampled = num_sampled.numpy().astype(np.int64)

    def wants_drafts(self, batch: Any) -> bool:
        """See `Decider`."""
        drafted = batch.num_draft_tokens_per_req
        if drafted is None:
            drafted = np.zeros(batch.num_reqs, np.int64)
        accepted = np.clip(self._sampled - self._bonus, 0, drafted)
        if drafted.any():
            for listener in self._listeners:
                listener.record(self._confidences[batch.idx_mapping_np], drafted, accepted, batch.req_ids)
        if self._stats is not None:
            self._stats.verified(drafted[self._sampled > 0], accepted[self._sampled > 0])
            self._stats.drafted(batch.num_reqs)
        return True

    def drafted(self, batch: Any) -> None:
        """See `Decider`."""
        probabilities = self._speculator.draft_token_confidence_probs
        self._confidences[batch.idx_mapping_np] = probabilities[: batch.num_reqs].numpy()
