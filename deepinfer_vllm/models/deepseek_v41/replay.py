"""Decoder-side bounded replay: past the last KV source, a prefill runs only each request's last window of tokens.

Layers above the last KV source write nothing that later tokens read but their own window rows, so of a prompt only
the tokens that reach the next ones through those windows matter much. Skipping the others nearly halves prefill work.
It is an approximation: the first kept tokens see a truncated window in each of these layers. It rests on two things:

- a window row that was skipped is never read: `Step.window_floor` bounds what a token may see in these layers;
- after a prefix hit the last window is recomputed (vLLM's `bounded_replay` specs), for its rows may have been skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_vllm import envs
from deepinfer_vllm.models.deepseek_v41.step import Step
from deepinfer_vllm.native import invariance


@dataclass(frozen=True)
class BatchFacts:
    """What the runner knows of a batch and vLLM's metadata does not say; per request, in batch order."""

    keep_all: Sequence[bool]
    """Whether every token's hidden state is wanted (prompt logprobs)."""
    first_computed: Sequence[int]
    """Position from which the request has been computed here without a gap; 0 unless it began with a prefix hit."""
    cached_until: Sequence[int] = ()
    """Position up to which a prefix hit that is computed again lies in shared blocks. Empty where the runner does not
    tell: their rows are then written again, with what was there."""


def enabled(vllm_config: Any) -> bool:
    """Whether prefills may skip rows: by vLLM's --swa-bounded-replay and our variable.

    Not where answers must not depend on the batch: which tokens see truncated windows depends on how a prompt is cut.
    Only vLLM's own runners say what a batch must keep: V1 through `compat.hook_runner`, V2 through `model_state`. An
    out-of-tree platform may bring another runner.
    """
    from vllm.platforms import current_platform

    return bool(
        envs.DEEPINFER_VLLM_DECODER_REPLAY
        and getattr(vllm_config.cache_config, "swa_bounded_replay", True)
        and not current_platform.is_out_of_tree()
        and not invariance.decided()
    )


def cached_tokens(step: Step, facts: BatchFacts) -> torch.Tensor | None:
    """[T] bool: tokens whose rows lie in blocks that a prefix hit shares with others. None: there are none."""
    starts = (length - (end - start) for length, (start, end) in zip(step.seq_lens, step.spans, strict=True))
    if not any(limit > start for limit, start in zip(facts.cached_until, starts, strict=False)):
        return None
    limits = torch.tensor(facts.cached_until, dtype=torch.int64, device=step.positions.device)
    return step.positions < limits[step.request]


def narrow(step: Step, window: int, facts: BatchFacts) -> tuple[Step, torch.Tensor] | None:
    """(the step without the tokens to skip, their rows [T'] in it), or None when nothing is skipped or floored."""
    rows: list[int] = []
    spans: list[tuple[int, int]] = []
    floors: list[int] = []
    for i, (start, end) in enumerate(step.spans):
        kept = end - start if facts.keep_all[i] else min(end - start, window)
        first = facts.first_computed[i]
        floors.append(step.seq_lens[i] - kept if kept < end - start else first)
        spans.append((len(rows), len(rows) + kept))
        rows.extend(range(end - kept, end))
    if len(rows) == step.num_tokens and not any(floors):
        return None
    device = step.positions.device
    kept_rows = torch.tensor(rows, dtype=torch.int64, device=device)
    return step.take(kept_rows, spans, torch.tensor(floors, dtype=torch.int64, device=device)), kept_rows
