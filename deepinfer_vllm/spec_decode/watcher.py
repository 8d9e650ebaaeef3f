"""What became of drafts where every draft is verified, for whoever records it."""

from typing import Any

import numpy as np
import torch

from deepinfer_vllm.spec_decode.arrivals import Queue
from deepinfer_vllm.spec_decode.ledger import Ledger, Step
from deepinfer_vllm.spec_decode.listeners import Listens
from deepinfer_vllm.spec_decode.scheduled import samples
from deepinfer_vllm.spec_decode.stats import DraftStats


class Watcher:
    """A `Decider` that always drafts, and pairs the confidences of a draft with what the next step makes of it."""

    def __init__(
        self,
        speculator: Any,
        bonus_tokens: int,
        queue: Queue,
        listeners: list[Listens],
        stats: DraftStats | None = None,
    ) -> None:
        self._speculator, self._queue, self._listeners, self._stats = speculator, queue, listeners, stats
        self._ledger = Ledger(speculator.max_num_reqs, speculator.num_speculative_steps, bonus_tokens)

    def verified(self, num_sampled: torch.Tensor) -> None:
        """See `Decider`."""
        self._num_sampled, self._sampled = num_sampled, self._queue.moment()

    def wants_drafts(self, batch: Any) -> bool:
        """See `Decider`."""
        return True

    def drafted(self, batch: Any) -> None:
        """See `Decider`."""
        drafts = batch.num_draft_tokens_per_req
        self._ledger.launched(
            Step(
                batch.req_ids,
                batch.idx_mapping_np.astype(np.int64),
                np.zeros(batch.num_reqs, np.int64) if drafts is None else drafts.astype(np.int64),
                samples(batch),
                drafted=self._speculator.drafting,
                tokens=batch.num_tokens,
                context_tokens=0,
                predicted_s=0.0,
                usual=False,
                began=self._sampled,
                sampled=self._sampled,
                arrival=self._queue.fetch(
                    self._num_sampled, self._speculator.draft_token_confidence_probs[: batch.num_reqs]
                ),
            )
        )
        self.settle(wait=False)

    def settle(self, *, wait: bool) -> None:
        """Tell of the steps that are done; of all, if it is to `wait`."""
        for step, confidences, drafts, accepted, _, _ in self._ledger.arrived(keep=0, wait=wait):
            self._queue.read(step.arrival)
            if drafts.any():
                for listener in self._listeners:
                    listener.record(confidences, drafts, accepted, step.ids)
            if self._stats is not None:
                self._stats.stepped(step.samples, drafts, accepted, drafted=step.drafted)
