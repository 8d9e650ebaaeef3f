"""The token after the drafts that stand: from what the draft left of the target's distribution, or the bonus token.

Rows as in `verification`. R requests, V tokens of vocabulary in B blocks.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.native import invariance
from deepinfer_vllm.torch_kernels.distributions import judged_tokens, rows_of
from deepinfer_vllm.torch_kernels.gumbel import add_noise
from deepinfer_vllm.torch_kernels.winners import best_of_blocks, store_block_winners


def resample(
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    rejected_step_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    draft_sampled_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    cumulative_log_p_ptr: torch.Tensor | None,
    contexts_ptr: torch.Tensor | None,
    contexts_stride: int,
    watermarking_ptr: torch.Tensor | None,
    watermarking_skip_mask_ptr: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
) -> None:
    """Write each block's winner and its value [R, B] of a draw from the row after the drafts that stand: from the
    target where there is no draft to take away, or answers must not depend on drafts; otherwise from max(p - q, 0).
    Rows of temperature 0 stay, but for bonus tokens. Raises NotImplementedError for watermarks.
    """
    if WATERMARK:
        raise NotImplementedError("Watermarks have no PyTorch kernel; leave --watermark-config away")
    bounds, stands = cu_num_logits_ptr.numpy(), rejected_step_ptr.numpy()[: len(cu_num_logits_ptr) - 1]
    rows = bounds[:-1] + stands
    heat, bonus = temp_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[rows]], rows == bounds[1:] - 1
    chosen = np.flatnonzero((heat != 0) | bonus)
    if not len(chosen):
        return
    rows, heat, bonus = rows[chosen], heat[chosen], bonus[chosen]
    requests = expanded_idx_mapping_ptr.numpy()[rows]
    scores = rows_of(target_logits_ptr[:, :vocab_size], rows)
    tokens = np.where(bonus | invariance.decided(), -1, judged_tokens(draft_sampled_ptr.numpy(), rows))
    for i in np.flatnonzero(tokens >= 0):
        if draft_logits_ptr is None:
            scores[i, tokens[i]] = -np.inf
            continue
        r, step = chosen[i], stands[chosen[i]]
        draft = draft_logits_ptr[requests[i], step, :vocab_size].float().numpy() / heat[i]
        target = scores[i] - target_rejected_logsumexp_ptr.numpy()[r]
        if USE_BLOCK_VERIFICATION and step > 0:
            assert cumulative_log_p_ptr is not None
            target = target + cumulative_log_p_ptr.numpy()[rows[i] - 1]
        scores[i] = _excess(target, draft - draft_rejected_logsumexp_ptr.numpy()[r])
    if USE_FP64:
        scores = scores.astype(np.float64)
    add_noise(scores, heat, seed_ptr.numpy()[requests].tolist(), pos_ptr.numpy()[rows].tolist())
    winners, maxima = resampled_local_argmax_ptr.numpy(), resampled_local_max_ptr.numpy()
    found = winners[chosen], maxima[chosen]
    store_block_winners(scores, BLOCK_SIZE, *found)
    winners[chosen], maxima[chosen] = found


def _excess(target: NDArray[np.float32], draft: NDArray[np.float32]) -> NDArray[np.float32]:
    """log(max(p - q, 0)) from log p and log q."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.exp(draft - target)
        return np.where(ratio < 1, target + np.log1p(-ratio), np.float32(-np.inf)).astype(np.float32)


def insert_resampled(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:
    """Put the token drawn by `resample` after the drafts that stand, and count it in num_sampled [R]."""
    bounds, stands = cu_num_logits_ptr.numpy(), num_sampled_ptr.numpy()[: len(cu_num_logits_ptr) - 1]
    rows = bounds[:-1] + stands
    greedy = temp_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[rows]] == 0
    drawn = np.flatnonzero(~greedy | (rows == bounds[1:] - 1))
    best = best_of_blocks(resampled_local_argmax_ptr.numpy()[drawn], resampled_local_max_ptr.numpy()[drawn])
    sampled_ptr.numpy()[drawn, stands[drawn]] = best
    stands += 1
