"""Repetition, frequency and presence penalties, and the token counts that they need."""

import numpy as np
import torch

from deepinfer_vllm.torch_kernels.bits import pack_bits, unpack_bits


def penalties(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor,
    frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Penalise logits [T, vocabulary], float32, in place.

    A row counts the draft tokens before it, token_ids[row - position + 1 .. row], as generated.
    """
    logits, counts, bits = logits_ptr.numpy(), output_bin_counts_ptr.numpy(), prompt_bin_mask_ptr.numpy()
    repetition, frequency = repetition_penalty_ptr.numpy(), frequency_penalty_ptr.numpy()
    presence, drafts = presence_penalty_ptr.numpy(), token_ids_ptr.numpy()
    positions = expanded_local_pos_ptr.tolist()
    for row, request in enumerate(expanded_idx_mapping_ptr.tolist()):
        repeat, often, once = repetition[request], frequency[request], presence[request]
        if repeat == 1 and often == 0 and once == 0:
            continue
        generated = counts[request, :vocab_size].astype(np.float32)
        if positions[row]:
            np.add.at(generated, drafts[row - positions[row] + 1 : row + 1], 1)
        seen, values = generated > 0, logits[row, :vocab_size]
        if repeat != 1:
            scale = np.where(unpack_bits(bits[request])[:vocab_size] | seen, repeat, np.float32(1))
            values *= np.where(values > 0, np.float32(1) / scale, scale)
        values -= often * generated
        values -= once * seen


def bincount(
    expanded_idx_mapping_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Add each request's prompt tokens to its set, a bit a token, and those between prompt and prefill length, which
    it generated before it was preempted, to its counts."""
    tokens, counts, bits = all_token_ids_ptr.numpy(), output_bin_counts_ptr.numpy(), prompt_bin_mask_ptr.numpy()
    for request in expanded_idx_mapping_ptr.tolist():
        prompt, prefill = int(prompt_len_ptr[request]), int(prefill_len_ptr[request])
        seen = np.zeros(bits.shape[1] * 32, dtype=bool)
        seen[tokens[request, :prompt]] = True
        bits[request] |= pack_bits(seen)
        np.add.at(counts[request], tokens[request, prompt:prefill], 1)
