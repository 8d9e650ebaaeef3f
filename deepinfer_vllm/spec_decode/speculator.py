"""vLLM's DSpark speculator, asked for its confidences and ready to leave drafting out for a while.

What others want of a step hangs on it: a grammar that drafts keep to, a trace of the target's states, and whoever
decides about drafts and counts them.
"""

import time
from typing import Any, Protocol

import torch
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from deepinfer_vllm.spec_decode.stats import DraftStats

UNKNOWN = 0.8
"""The confidence of every draft where there is no confidence head; the controller corrects it by what is accepted."""


class Grammar(Protocol):
    """Masks drafts, position by position."""

    def mask(self, step: int, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Set logits [R, V] of tokens that may not stand at draft position `step` to -inf, in place.

        slots [R] int64 are the requests' places in the runner's request state, negative for rows of no request.
        """

    def drafted(self, step: int, tokens: torch.Tensor) -> None:
        """Tokens [R] int64 that were drafted at position `step`, for the slots of the `mask` before."""

    def ended(self, confidences: torch.Tensor, stats: DraftStats | None) -> None:
        """The block is drafted. Set its confidences [R, S] to 1, in place, where a draft had no alternative."""


class Trace(Protocol):
    """Keeps the target's states for training a draft model."""

    def observe(self, batch: Any, states: list[torch.Tensor], last: torch.Tensor) -> None:
        """The batch of a step of the target, its states [T, hidden] of each target layer, and after the final norm."""


class Decider(Protocol):
    """Decides whether the next step drafts, and learns how drafts fared."""

    def verified(self, num_sampled: torch.Tensor) -> None:
        """num_sampled [R] tokens came out of the step that just ended, for the requests of its batch in order."""

    def wants_drafts(self, batch: Any) -> bool:
        """Whether a draft block for the requests of this batch is worth its cost."""

    def drafted(self, batch: Any) -> None:
        """The draft block, or what is left of it without drafts, has run for this batch."""


class ControlledSpeculator(DSparkSpeculator):
    """On any device; nothing here waits for it, but to time dummy runs."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.grammar: Grammar | None = None
        self.trace: Trace | None = None
        self.decider: Decider | None = None
        self.stats: DraftStats | None = None
        self.drafting = True
        """Whether the latest step drafted. If not, `draft_tokens` are of an older step and must not be used."""
        self.proposed_for, self.proposal_s = 0, 0.0
        """Requests of the latest dummy run's proposal, and the seconds it took."""

    def now(self) -> float:
        """Seconds, when the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """vLLM's hook. It asks the confidence head only where graphs let it trim drafts; here it is always asked."""
        model = super().load_draft_model(target_model, target_attn_layer_names)
        self.use_confidence_head = getattr(model.model, "confidence_head", None) is not None
        self.draft_token_confidence_probs.fill_(UNKNOWN)
        return model

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """vLLM's hook, between a step's sampling and its drafting."""
        super().observe_verification(idx_mapping, num_sampled, num_rejected)
        if self.decider is not None:
            self.decider.verified(num_sampled)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """vLLM's hook: drafts [R, S] of a batch, or what is left in their place where drafting does not pay.

        Context rows are written either way, so that drafting can go on with the step after.
        """
        real, began = not dummy_run, 0.0 if not dummy_run else self.now()
        if real and self.trace is not None and aux_hidden_states:
            self.trace.observe(input_batch, aux_hidden_states, last_hidden_states)
        wanted = not real or self.decider is None or self.decider.wants_drafts(input_batch)
        self.drafting = wanted and kwargs.get("num_speculative_tokens") != 0  # of which nobody would make use
        if not self.drafting:
            kwargs["num_speculative_tokens"] = 0  # newer vLLM writes the context's rows and stops there
        drafts = super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            *args,
            dummy_run=dummy_run,
            **kwargs,
        )
        if not real:
            self.proposed_for, self.proposal_s = input_batch.num_reqs, self.now() - began
        elif self.decider is not None:
            self.decider.drafted(input_batch)
        return drafts

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return super()._build_uniform_attn_metadata(*args, **kwargs) if self.drafting else None

    def _generate_draft(self, *args: Any, **kwargs: Any) -> None:
        if not self.drafting:
            return
        super()._generate_draft(*args, **kwargs)
        if self.grammar is not None:
            self.grammar.ended(self.draft_token_confidence_probs, self.stats)

    def _sample_logits(
        self, logits: torch.Tensor, idx_map: torch.Tensor, sample_pos: torch.Tensor, step: int
    ) -> torch.Tensor:
        if self.grammar is None:
            return super()._sample_logits(logits, idx_map, sample_pos, step)
        self.grammar.mask(step, logits, idx_map)
        tokens = super()._sample_logits(logits, idx_map, sample_pos, step)
        self.grammar.drafted(step, tokens)
        return tokens
