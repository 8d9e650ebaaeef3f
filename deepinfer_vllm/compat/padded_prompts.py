"""Logprobs of prompt tokens that are none: vLLM pads a prompt of one token with drafts to come, beside decodes."""

import functools
from typing import Any


def drop_logprobs_of_padding() -> None:
    """Return as many rows of prompt logprobs as the prompt has tokens but the first, and none of its padding.

    With drafts and other requests in the step, vLLM's scheduler gives a prompt of one token the size of a decode, and
    runner V2 takes all but the last of these for prompt. Called as a model is built.
    """
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    compute = PromptLogprobsWorker.compute_prompt_logprobs
    if hasattr(compute, "deepinfer_hooked"):
        return

    @functools.wraps(compute)
    def compute_and_drop(
        self: Any,
        logits_fn: Any,
        hidden_states: Any,
        input_batch: Any,
        all_token_ids: Any,
        num_computed_tokens: Any,
        prompt_lens: Any,
    ) -> Any:
        found = compute(self, logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens)
        if not found:
            return found
        slots = dict(zip(input_batch.req_ids, input_batch.idx_mapping_np, strict=False))
        return {
            name: rows
            for name, full in found.items()
            if len((rows := _first(full, int(prompt_lens[slots[name]]) - 1)).logprobs)
        }

    compute_and_drop.deepinfer_hooked = True  # type: ignore[attr-defined]
    PromptLogprobsWorker.compute_prompt_logprobs = compute_and_drop


def _first(rows: Any, count: int) -> Any:
    if len(rows.logprobs) <= count:
        return rows
    return rows._replace(
        logprob_token_ids=rows.logprob_token_ids[:count],
        logprobs=rows.logprobs[:count],
        selected_token_ranks=rows.selected_token_ranks[:count],
    )
