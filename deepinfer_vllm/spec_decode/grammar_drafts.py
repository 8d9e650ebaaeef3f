"""Drafts of requests with structured outputs, masked by the request's grammar while they are drawn.

Without it a draft that the grammar forbids ends its block: the scheduler cuts it and everything after it. The mask is
put on the draft's logits before sampling, so that what is drawn from is also what rejection is told: outputs keep the
target's distribution whatever is masked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from deepinfer_vllm.spec_decode.grammar_requests import GrammarRequests
from deepinfer_vllm.spec_decode.grammar_state import GrammarState

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from deepinfer_vllm.spec_decode.stats import DraftStats


class GrammarDrafts:
    """The masks on a worker's drafts. While no request has a grammar every call returns at once.

    For the thread of the model's steps.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.requests = GrammarRequests(vllm_config)
        """To be told which requests come and go; see `compat.hook_grammar_requests`."""
        self.masked_drafts = 0
        """Tokens that were drafted under a mask, since the start."""
        self._steps = vllm_config.num_speculative_tokens
        words = -(-vllm_config.model_config.get_vocab_size() // 32)
        self._bitmask = torch.zeros(vllm_config.scheduler_config.max_num_seqs, words, dtype=torch.int32)
        self._block: dict[int, GrammarState] = {}
        """The states by row of the batch that is being drafted for."""
        self._forced: list[tuple[int, int]] = []
        """Rows and positions of the block at which there was one token to choose from."""
        self._told = (0, 0)
        """What of the counts is in the metrics."""

    def mask(self, step: int, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Drop from `logits` [R, vocabulary], in place, what the grammars forbid at draft position `step`.

        `slots` [R] are places in the worker's request state; -1 is none. The steps of a block come in order from 0.
        """
        if not self.requests:
            return
        if step == 0:
            self._block, self._forced = self.requests.states(slots), []
        rows = [row for row, state in self._block.items() if state.fill(self._bitmask, row)]
        choices = several(self._bitmask[rows]) if rows else []
        rows = [row for row, few in zip(rows, choices, strict=True) if few]
        self._block = {row: self._block[row] for row in rows}
        if not rows:
            return
        import xgrammar

        self.masked_drafts += len(rows)
        xgrammar.apply_token_bitmask_inplace(logits, self._bitmask[: len(logits)].to(logits.device), indices=rows)
        self._forced += [(row, step) for row, few in zip(rows, filter(None, choices), strict=True) if few == 1]

    def drafted(self, step: int, tokens: torch.Tensor) -> None:
        """What was drawn at draft position `step`: `tokens` [R]."""
        if not self.requests or not self._block or step == self._steps - 1:
            return
        drawn = tokens.tolist()
        for row, state in self._block.items():
            state.draft(drawn[row])

    def ended(self, confidences: torch.Tensor, stats: DraftStats | None) -> None:
        """The block is drafted. Make those of its `confidences` [R, S] 1, in place, where a grammar left one token.

        The target's mask leaves it the same one, so such a draft stands if those before it do.
        """
        if self.requests and self._forced:
            rows, steps = zip(*self._forced, strict=True)
            confidences[list(rows), list(steps)] = 1.0
        counts = self.masked_drafts, self.requests.unmasked
        if stats is not None and counts != self._told:
            stats.masked(counts[0] - self._told[0], counts[1] - self._told[1])
            self._told = counts


def several(bitmasks: torch.Tensor) -> list[int]:
    """How many bits each of `bitmasks` [n, words] int32 has: 0, 1, or 2 for more."""
    words = bitmasks.numpy().view(np.uint32)
    used, total = np.count_nonzero(words, axis=1), words.sum(1, dtype=np.uint64)
    more = (used > 1) | (total & (total - np.uint64(1)) != 0)  # total is the one word, where only one is not 0
    found: list[int] = np.where(used == 0, 0, 1 + more).tolist()
    return found


def grammar_drafts(vllm_config: VllmConfig) -> GrammarDrafts | None:
    """What keeps an engine's drafts to its requests' grammars, told of the requests from now on.

    None where DEEPINFER_VLLM_DSPARK_GRAMMAR=0, where there is no tokenizer and so no grammar, and where the draft model
    does not draw from all of the target's vocabulary, so that a mask could leave it nothing.
    """
    from deepinfer_vllm import envs
    from deepinfer_vllm.compat import hook_grammar_requests

    model, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config.hf_config
    drawn_from = getattr(draft, "dspark_draft_topk", None) or getattr(draft, "draft_vocab_size", None)
    if not envs.DEEPINFER_VLLM_DSPARK_GRAMMAR or model.skip_tokenizer_init:
        return None
    if drawn_from is not None and drawn_from < model.get_vocab_size():
        return None
    hook_grammar_requests()
    return GrammarDrafts(vllm_config)
