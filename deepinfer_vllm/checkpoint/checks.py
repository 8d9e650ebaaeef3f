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
    rows = prefill_rows(prefill, prompt, limits)
    if prompt.gen_ids is None:
        return rows
    if limits.greedy_exact:
        generation = backend.generate(ids, len(prompt.gen_ids))
        return rows + generation_rows(generation, prompt, limits)
    forced = backend.prefill(ids + prompt.gen_ids.tolist()[:-1])
    steps = Generation(prompt.gen_ids.tolist(), forced.logits[len(ids) - 1 :])
    return rows + generation_rows(steps, prompt, limits)


def prefill_rows(got: Prefill, prompt: Prompt, limits: Limits) -> list[Row]:
    """Logits, argmax, hidden states and selections of the prompt itself."""
    where, rows = prompt.name, []
    tokens = len(prompt.input_ids)
    if prompt.logits_last8 is not None:
        last = got.logits[-len(prompt.logits_last8) :]
        rows += _logit_rows(where, "last logits", last, prompt.logits_last8, tokens, limits)
    if prompt.argmax is not None:
        argmax = got.logits.argmax(-1)
        if limits.argmax_margin is not None and prompt.margin is not None:
            rows.append(compare.argmax_exact(where, argmax, prompt.argmax, prompt.margin, limits.argmax_margin))
        if limits.argmax_agreement is not None and tokens >= limits.argmax_from_tokens:
            rows.append(compare.argmax_agreement(where, argmax, prompt.argmax, limits.argmax_agreement))
    if limits.hidden_rel is not None and got.hidden_states is not None and prompt.hidden_states is not None:
        rows += compare.hidden_states(where, got.hidden_states, prompt.hidden_states, limits.hidden_rel)
    return rows + _selection_rows(got, prompt, limits)


def generation_rows(got: Generation, prompt: Prompt, limits: Limits) -> list[Row]:
    """Tokens and logits of the continuation; logits only as far as the tokens before them are the golden ones."""
    where, rows = prompt.name, []
    assert prompt.gen_ids is not None
    if limits.greedy_exact:
        rows.append(compare.greedy(where, got.ids, prompt.gen_ids))
    if got.logits is not None and prompt.gen_logits is not None:
        pairs = zip(got.ids, prompt.gen_ids.tolist(), strict=False)
        differing = [step for step, (mine, golden) in enumerate(pairs) if mine != golden]
        comparable = differing[0] + 1 if differing else min(len(got.logits), len(prompt.gen_logits))
        tokens = len(prompt.input_ids)
        mine, golden = got.logits[:comparable], prompt.gen_logits[:comparable]
        rows += _logit_rows(where, "generated logits", mine, golden, tokens, limits)
    return rows


def _logit_rows(where: str, what: str, got: torch.Tensor, want: torch.Tensor, tokens: int, limits: Limits) -> list[Row]:
    rows = []
    if limits.max_abs is not None:
        rows.append(compare.max_abs(where, what, got, want, limits.max_abs))
    if (limit := limits.rel_rms_for(tokens)) is not None:
        rows.append(compare.rel_rms(where, what, got, want, limit))
    return rows


def _selection_rows(got: Prefill, prompt: Prompt, limits: Limits) -> list[Row]:
    where, rows = prompt.name, []
    if limits.router_rows is not None and got.router_ids is not None and prompt.router_ids is not None:
        mine, golden = got.router_ids.flatten(0, 1), prompt.router_ids.flatten(0, 1)
        mine_sets, golden_sets = compare.padded_sets(mine), compare.padded_sets(golden)
        rows.append(compare.selections(where, "experts", mine_sets, golden_sets, limits.router_rows))
    if limits.index_topk_rows is not None:
        for layer, chosen in sorted(prompt.index_topk.items()):
            if layer in got.index_topk:
                golden_sets = compare.padded_sets(chosen)
                what = f"compressed rows, layer {layer}"
                rows.append(compare.selections(where, what, got.index_topk[layer], golden_sets, limits.index_topk_rows))
        if got.candidate_blocks is not None and prompt.candidate_blocks is not None:
            blocks = compare.flagged_sets(prompt.candidate_blocks)
            what = "candidate blocks"
            rows.append(compare.selections(where, what, got.candidate_blocks, blocks, limits.index_topk_rows))
    if got.engram_hash_ids is not None and prompt.engram_hash_ids is not None:
        mine, golden = got.engram_hash_ids.long(), prompt.engram_hash_ids.long()
        rows.append(compare.max_abs(where, "Engram rows", mine, golden, 0))
    return rows
