"""All comparisons that apply to one prompt, given what a backend computed for it."""

from __future__ import annotations

import torch

from deepinfer_vllm.checkpoint import compare
from deepinfer_vllm.checkpoint.compare import Row
from deepinfer_vllm.checkpoint.golden import Prompt
from deepinfer_vllm.checkpoint.interface import Backend, Generation, Prefill
from deepinfer_vllm.checkpoint.limits import Limits


def check_prompt(backend: Backend, prompt: Prompt, limits: Limits) -> list[Row]:
    """Run a prompt through the backend and compare.

    Where greedy paths must be equal the backend generates by itself, from its own cache. Where they may part
    (bf16) the golden tokens are fed as part of the prompt, so that each step is still comparable.
    """
    ids = prompt.input_ids.tolist()
    prefill = backend.prefill(ids)
    if prompt.gen_ids is None:
        return prompt_rows(prefill, None, prompt, limits)
    golden_ids = prompt.gen_ids.tolist()
    if limits.greedy_exact:
        return prompt_rows(prefill, backend.generate(ids, len(golden_ids)), prompt, limits)
    forced = backend.prefill(ids + golden_ids[:-1])
    return prompt_rows(prefill, Generation(golden_ids, forced.logits[len(ids) - 1 :]), prompt, limits)


def prompt_rows(got: Prefill, continuation: Generation | None, prompt: Prompt, limits: Limits) -> list[Row]:
    """Everything that both the golden file and the backend have for a prompt."""
    return [
        *_logit_rows(got, continuation, prompt, limits),
        *_token_rows(got, continuation, prompt, limits),
        *_hidden_rows(got, prompt, limits),
        *_selection_rows(got, prompt, limits),
    ]


def _logit_rows(got: Prefill, continuation: Generation | None, prompt: Prompt, limits: Limits) -> list[Row]:
    """max abs for the prompt's end and for the continuation; rel for both together, as the format defines it.

    A continuation is comparable up to the first token that is not the golden one.
    """
    rows: list[Row] = []
    mine, golden = [], []
    if prompt.logits_last8 is not None:
        last = got.logits[-len(prompt.logits_last8) :]
        if limits.max_abs is not None:
            rows.append(compare.max_abs(prompt.name, "last logits", last, prompt.logits_last8, limits.max_abs))
        mine, golden = [last], [prompt.logits_last8]
    if continuation is not None and continuation.logits is not None and prompt.gen_logits is not None:
        count = _comparable_steps(continuation, prompt)
        steps, golden_steps = continuation.logits[:count], prompt.gen_logits[:count]
        if limits.max_abs is not None:
            rows.append(compare.max_abs(prompt.name, "generated logits", steps, golden_steps, limits.max_abs))
        repeated = len(mine)  # the first step is the prompt's last row once more
        mine.append(steps[repeated:])
        golden.append(golden_steps[repeated:])
    limit = limits.rel_rms_for(len(prompt.input_ids))
    if mine and limit is not None:
        rows.append(compare.rel_rms(prompt.name, "logits", torch.cat(mine), torch.cat(golden), limit))
    return rows


def _comparable_steps(continuation: Generation, prompt: Prompt) -> int:
    assert prompt.gen_ids is not None
    golden_ids = prompt.gen_ids.tolist()
    pairs = zip(continuation.ids, golden_ids, strict=False)
    return next((step + 1 for step, (mine, golden) in enumerate(pairs) if mine != golden), len(golden_ids))


def _token_rows(got: Prefill, continuation: Generation | None, prompt: Prompt, limits: Limits) -> list[Row]:
    where, rows = prompt.name, []
    argmax = got.logits.argmax(-1)
    if prompt.argmax is not None and prompt.margin is not None and limits.argmax_margin is not None:
        rows.append(compare.argmax_exact(where, argmax, prompt.argmax, prompt.margin, limits.argmax_margin))
    is_long = len(prompt.input_ids) >= limits.argmax_from_tokens
    if prompt.argmax is not None and limits.argmax_agreement is not None and is_long:
        rows.append(compare.argmax_agreement(where, argmax, prompt.argmax, limits.argmax_agreement))
    if continuation is not None and prompt.gen_ids is not None and limits.greedy_exact:
        rows.append(compare.greedy(where, continuation.ids, prompt.gen_ids))
    return rows


def _hidden_rows(got: Prefill, prompt: Prompt, limits: Limits) -> list[Row]:
    if limits.hidden_rel is None or got.hidden_states is None or prompt.hidden_states is None:
        return []
    return compare.hidden_states(prompt.name, got.hidden_states, prompt.hidden_states, limits.hidden_rel)


def _selection_rows(got: Prefill, prompt: Prompt, limits: Limits) -> list[Row]:
    """Experts, compressed rows and candidate blocks as sets; Engram's table rows exactly, whatever the numerics."""
    where, rows = prompt.name, []
    if limits.router_rows is not None and got.router_ids is not None and prompt.router_ids is not None:
        chosen, golden = (compare.padded_sets(ids.flatten(0, 1)) for ids in (got.router_ids, prompt.router_ids))
        rows.append(compare.selections(where, "experts", chosen, golden, limits.router_rows))
    if limits.index_topk_rows is not None:
        for layer in sorted(prompt.index_topk.keys() & got.index_topk.keys()):
            golden = compare.padded_sets(prompt.index_topk[layer])
            what = f"compressed rows, layer {layer}"
            rows.append(compare.selections(where, what, got.index_topk[layer], golden, limits.index_topk_rows))
        if got.candidate_blocks is not None and prompt.candidate_blocks is not None:
            golden = compare.flagged_sets(prompt.candidate_blocks)
            what = "candidate blocks"
            rows.append(compare.selections(where, what, got.candidate_blocks, golden, limits.index_topk_rows))
    if got.engram_hash_ids is not None and prompt.engram_hash_ids is not None:
        mine, table_rows = got.engram_hash_ids.long(), prompt.engram_hash_ids.long()
        rows.append(compare.max_abs(where, "Engram rows", mine, table_rows, 0))
    return rows
