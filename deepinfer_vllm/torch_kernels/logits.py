"""Changes to logits [T, vocabulary] in place, by the sampling parameters of each row's request."""

import math

import torch

from deepinfer_vllm.torch_kernels.bits import unpack_bits


def temperature(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Divide each row by its temperature; 0 means greedy and leaves it alone."""
    chosen = temperature_ptr[expanded_idx_mapping_ptr]
    logits_ptr.div_(torch.where(chosen == 0, 1, chosen).unsqueeze(-1))


def min_p(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Drop tokens less likely than min_p times the likeliest: below its logit plus log(min_p)."""
    least = min_p_ptr[expanded_idx_mapping_ptr]
    threshold = logits_ptr.amax(-1, keepdim=True) + least.log().unsqueeze(-1)  # -inf where min_p is 0
    logits_ptr.masked_fill_(logits_ptr < threshold, -math.inf)


def bias(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: torch.Tensor,
    bias_token_ids_ptr: torch.Tensor,
    bias_token_ids_stride: int,
    bias_ptr: torch.Tensor,
    bias_stride: int,
    pos_ptr: torch.Tensor,
    min_lens_ptr: torch.Tensor,
    num_stop_token_ids_ptr: torch.Tensor,
    restore_when_all_masked_ptr: torch.Tensor,
    stop_token_ids_ptr: torch.Tensor,
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Of each row keep the allowed tokens, add the bias, and drop stop tokens before the least length.

    With CHECK_ALL_MASKED_ROWS, a request that asks for it gets its stop tokens back where nothing else is left.
    """
    positions = pos_ptr.tolist()
    for row, request in enumerate(expanded_idx_mapping_ptr.tolist()):
        logits = logits_ptr[row]
        allowed = allowed_token_ids_ptr[request, : num_allowed_token_ids_ptr[request]].long()
        if len(allowed):
            kept = logits[allowed]
            logits.fill_(-math.inf)
            logits[allowed] = kept
        biased = int(num_logit_bias_ptr[request])
        if biased:
            logits[bias_token_ids_ptr[request, :biased].long()] += bias_ptr[request, :biased]
        stops = stop_token_ids_ptr[request, : num_stop_token_ids_ptr[request]].long()
        if len(stops) == 0 or positions[row] + 1 >= min_lens_ptr[request]:
            continue
        stop_logits = logits[stops]
        logits[stops] = -math.inf
        if CHECK_ALL_MASKED_ROWS and restore_when_all_masked_ptr[request] and logits.max() == -math.inf:
            finite = stop_logits.isfinite()
            logits[stops[finite]] = stop_logits[finite]


def bad_words(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    bad_word_token_ids_ptr: torch.Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: torch.Tensor,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
) -> None:
    """Drop the last token of a bad word from each row whose output, drafts before the row included, ends with the
    others."""
    positions, drafts = expanded_local_pos_ptr.tolist(), input_ids_ptr.tolist()
    for row, request in enumerate(expanded_idx_mapping_ptr.tolist()):
        offsets = bad_word_offsets_ptr[request, : num_bad_words_ptr[request] + 1].tolist()
        if len(offsets) == 1:
            continue
        words = [bad_word_token_ids_ptr[request, a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
        end, longest = int(total_len_ptr[request]), max(map(len, words))
        start = max(int(prompt_len_ptr[request]), end - longest)
        output = all_token_ids_ptr[request, start:end].tolist() + drafts[row - positions[row] + 1 : row + 1]
        for *prefix, last in words:
            if output[len(output) - len(prefix) :] == prefix and len(output) >= len(prefix):
                logits_ptr[row, last] = -math.inf


def grammar_bitmask(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    logits_indices_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    bitmask_ptr: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Drop the tokens whose bit is 0. Mask i [words] is for the row at place index % MASK_STRIDE of request
    index // MASK_STRIDE, index = logits_indices[i], if the request has so many rows."""
    bounds = cu_num_logits_ptr.tolist()
    for mask, index in zip(bitmask_ptr.numpy(), logits_indices_ptr.tolist(), strict=True):
        request, place = divmod(index, MASK_STRIDE)
        row = bounds[request] + place
        if row < bounds[request + 1]:
            barred = ~unpack_bits(mask)[:vocab_size]
            logits_ptr[row].masked_fill_(torch.from_numpy(barred), -math.inf)


def num_nans(
    logits_ptr: torch.Tensor, logits_stride: int, num_nans_ptr: torch.Tensor, vocab_size: int, BLOCK_SIZE: int
) -> None:
    """Count each row's NaNs."""
    num_nans_ptr.copy_(logits_ptr.isnan().sum(-1))
