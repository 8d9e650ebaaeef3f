"""The token after the drafts that stand: from what the draft left of the target's distribution, or the bonus token.

Rows as in `verification`. R requests, V tokens of vocabulary in B blocks.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.torch_kernels.gumbel import noise
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
    target where there is no draft to take away, otherwise from max(p - q, 0). Rows of temperature 0 stay, but for
    bonus tokens. Raises NotImplementedError for watermarks.
    """
    if WATERMARK:
        raise NotImplementedError("Watermarks have no PyTorch kernel; leave --watermark-config away")
    bounds = cu_num_logits_ptr.tolist()
    winners, maxima = resampled_local_argmax_ptr.numpy(), resampled_local_max_ptr.numpy()
    for r, step in enumerate(rejected_step_ptr.tolist()[: len(bounds) - 1]):
        row, bonus = bounds[r] + step, bounds[r] + step == bounds[r + 1] - 1
        request = int(expanded_idx_mapping_ptr[row])
        temperature = float(temp_ptr[request])
        if temperature == 0 and not bonus:
            continue
        scores = target_logits_ptr[row, :vocab_size].float().numpy()
        token = -1 if bonus else int(draft_sampled_ptr[row + 1])
        if token >= 0:
            if draft_logits_ptr is None:
                scores = np.where(np.arange(vocab_size) != token, scores, np.float32(-np.inf))
            else:
                draft = draft_logits_ptr[request, step, :vocab_size].float().numpy() / np.float32(temperature)
                target = scores - np.float32(target_rejected_logsumexp_ptr[r])
                if USE_BLOCK_VERIFICATION and step > 0:
                    assert cumulative_log_p_ptr is not None
                    target = target + np.float32(cumulative_log_p_ptr[row - 1])
                scores = _excess(target, draft - np.float32(draft_rejected_logsumexp_ptr[r]))
        if USE_FP64:
            scores = scores.astype(np.float64)
        if temperature != 0:
            scores = scores + noise([int(seed_ptr[request])], [int(pos_ptr[row])], vocab_size, USE_FP64)[0]
        store_block_winners(scores[None], BLOCK_SIZE, winners[r : r + 1], maxima[r : r + 1])


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
    bounds = cu_num_logits_ptr.tolist()
    best = best_of_blocks(resampled_local_argmax_ptr.numpy(), resampled_local_max_ptr.numpy())
    for r, stands in enumerate(num_sampled_ptr.tolist()[: len(bounds) - 1]):
        row = bounds[r] + stands
        num_sampled_ptr[r] = stands + 1
        if float(temp_ptr[int(expanded_idx_mapping_ptr[row])]) == 0 and row != bounds[r + 1] - 1:
            continue
        sampled_ptr[r, stands] = best[r]
