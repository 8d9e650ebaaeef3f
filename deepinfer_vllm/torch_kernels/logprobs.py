"""Logprobs and ranks of chosen tokens, and which tokens are chosen."""

import numpy as np
import torch


def topk_log_softmax(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    topk_ids_ptr: torch.Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Write the log-softmax over logits [T, vocabulary], in float32, at token ids [T, topk]."""
    torch.gather(torch.log_softmax(logits_ptr, -1, dtype=torch.float32), -1, topk_ids_ptr, out=output_ptr)


def ranks(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    token_ids_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Write how many logits of each row [T, vocabulary] are not below its token's: 1 for the largest."""
    chosen = logits_ptr.gather(-1, token_ids_ptr.long().unsqueeze(-1))
    torch.sum(logits_ptr >= chosen, -1, out=output_ptr)


def fill_logprob_token_ids(
    out_token_ids_ptr: torch.Tensor,
    out_token_ids_stride: int,
    out_valid_mask_ptr: torch.Tensor,
    out_valid_mask_stride: int,
    sampled_token_ids_ptr: torch.Tensor,
    topk_indices_ptr: torch.Tensor,
    topk_indices_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_stride: int,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    """Write each row's token ids [T, 1 + columns] and which columns count: the sampled token, then the tokens that its
    request names, or else the most likely ones."""
    out_token_ids_ptr[:, 0] = sampled_token_ids_ptr
    out_valid_mask_ptr[:, 0] = True
    for row, request in enumerate(expanded_idx_mapping_ptr.tolist()):
        named = int(num_per_req_token_ids_ptr[request])
        chosen = per_req_token_ids_ptr[request, :named] if named else topk_indices_ptr[row, :NUM_TOPK]
        out_token_ids_ptr[row, 1 : 1 + len(chosen)] = chosen
        out_valid_mask_ptr[row, 1 : 1 + len(chosen)] = True


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the token that follows each token of the batch [T]."""
    target, tokens = prompt_logprobs_token_ids_ptr.numpy(), all_token_ids_ptr.numpy()
    bounds = query_start_loc_ptr.tolist()
    for i, request in enumerate(idx_mapping_ptr.tolist()):
        start, length = int(num_computed_tokens_ptr[request]) + 1, bounds[i + 1] - bounds[i]
        following = tokens[request, start : start + length]
        target[bounds[i] : bounds[i + 1]] = np.pad(following, (0, length - len(following)))
