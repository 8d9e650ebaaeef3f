"""Sums of exponentials of logits, by block and whole, and what block verification needs of them.

Rows are logits: a request with d drafts has d + 1, one for each draft's place and one for the bonus token. N rows, V
tokens of vocabulary in B blocks.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.torch_kernels.distributions import (
    Distributions,
    Floats,
    Indices,
    draft_rows,
    judged_tokens,
    rows_of,
)
from deepinfer_vllm.torch_kernels.registry import by_name


@by_name
def local_logits_stats(
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    num_speculative_steps: int | None = None,
    num_logits: int | None = None,
) -> None:
    """Per block [N, B] of the target's logits: at temperature 0 its largest and where, otherwise its largest and the
    sum of exponentials relative to it; the same of the draft's. Rows of bonus tokens, as far as they show, stay."""
    local, requests = expanded_local_pos_ptr.numpy(), expanded_idx_mapping_ptr.numpy()
    heat, judging = temp_ptr.numpy()[requests], is_draft_place(local, num_speculative_steps)
    greedy, drawn = np.flatnonzero(judging & (heat == 0)), np.flatnonzero(judging & (heat != 0))
    for block, start in enumerate(range(0, vocab_size, BLOCK_SIZE)):
        tokens = slice(start, min(start + BLOCK_SIZE, vocab_size))
        if len(greedy):
            logits = rows_of(target_logits_ptr[:, tokens], greedy)
            best = logits.argmax(-1)
            target_local_argmax_ptr.numpy()[greedy, block] = best + start
            target_local_max_ptr.numpy()[greedy, block] = logits[np.arange(len(greedy)), best]
        if len(drawn):
            logits = rows_of(target_logits_ptr[:, tokens], drawn)
            _store(target_local_max_ptr, target_local_sumexp_ptr, drawn, block, logits)
            if draft_logits_ptr is not None:
                logits = rows_of(draft_logits_ptr[:, :, tokens], requests[drawn], local[drawn]) / heat[drawn, None]
                _store(draft_local_max_ptr, draft_local_sumexp_ptr, drawn, block, logits)


def is_draft_place(local: NDArray[np.integer], steps: int | None) -> NDArray[np.bool_]:
    """[N] rows that judge a draft: by the drafts a request can have, or (vLLM 0.33) by where the next one begins."""
    return local < steps if steps is not None else np.append(local[1:], 0) != 0


def _store(maxima: torch.Tensor, sums: torch.Tensor, rows: Indices, block: int, logits: Floats) -> None:
    largest = logits.max(-1)
    finite = np.where(largest > -np.inf, largest, np.float32(0))
    maxima.numpy()[rows, block] = largest
    sums.numpy()[rows, block] = np.exp(logits - finite[:, None]).sum(-1)


def cumulative_log_p(
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    num_warps: int = 1,
) -> None:
    """For each draft's row: the log of the running ratio of target and draft probability, never above 0. Drafts of -1
    keep it; requests of temperature 0 have none."""
    given = Distributions(
        target_logits_ptr,
        target_local_max_ptr,
        target_local_sumexp_ptr,
        draft_logits_ptr,
        draft_local_max_ptr,
        draft_local_sumexp_ptr,
    )
    requests, bounds = idx_mapping_ptr.numpy(), cu_num_logits_ptr.numpy()
    heat = temp_ptr.numpy()[requests]
    rows, there = draft_rows(bounds, int(np.diff(bounds).max()) - 1)
    tokens = judged_tokens(draft_sampled_ptr.numpy(), rows)
    there &= heat[:, None] != 0
    judged = there & (tokens >= 0)
    of, steps = np.nonzero(judged)
    at, drafted = rows[judged], tokens[judged]
    gained = np.zeros(rows.shape, dtype=np.float32)
    gained[judged] = given.target_log_p(at, drafted) - given.draft_log_p(at, requests[of], steps, drafted, heat[of])
    ratio: Floats = np.zeros(len(rows), dtype=np.float32)
    for step in range(rows.shape[1]):
        ratio = np.minimum(ratio + gained[:, step], np.float32(0))
        cumulative_log_p_ptr.numpy()[rows[there[:, step], step]] = ratio[there[:, step]]


@by_name
def local_residual_mass(
    local_residual_mass_ptr: torch.Tensor,
    local_residual_mass_stride: int,
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_logits_ptr: torch.Tensor,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    vocab_num_blocks: int,
    BLOCK_SIZE: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    num_speculative_steps: int | None = None,
    num_logits: int | None = None,
) -> None:
    """Per block [N, B]: how much of the target's mass, times the ratio so far, exceeds the draft's. Only for rows of
    second and later drafts."""
    given = Distributions(
        target_logits_ptr,
        target_local_max_ptr,
        target_local_sumexp_ptr,
        draft_logits_ptr,
        draft_local_max_ptr,
        draft_local_sumexp_ptr,
    )
    local, requests = expanded_local_pos_ptr.numpy(), expanded_idx_mapping_ptr.tolist()
    drafts = draft_sampled_ptr.tolist()
    for row in np.flatnonzero(is_draft_place(local, num_speculative_steps) & (local > 0)):
        temperature = float(temp_ptr[requests[row]])
        if row + 1 >= len(drafts) or drafts[row + 1] < 0 or temperature == 0:
            continue
        target = target_logits_ptr[row, :vocab_size].float().numpy() - given.target_log_sums[row]
        draft = draft_logits_ptr[requests[row], local[row], :vocab_size].float().numpy() / np.float32(temperature)
        ratio = np.exp(np.float32(cumulative_log_p_ptr[row - 1]))
        excess = np.maximum(ratio * np.exp(target) - np.exp(draft - given.draft_log_sums[row]), np.float32(0))
        blocks = [excess[start : start + BLOCK_SIZE].sum() for start in range(0, vocab_size, BLOCK_SIZE)]
        local_residual_mass_ptr.numpy()[row] = blocks
