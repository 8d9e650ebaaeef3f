"""What runner V2 feeds a step: token ids, positions, lengths, and where the logits lie. R requests, T tokens."""

import numpy as np
import torch


def prepare_prefill_inputs(
    input_ids_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the tokens of requests that still prefill into input_ids [T], and the `num_lookahead` after them into
    next_prefill_tokens [lookahead, all requests], 0 past the prompt."""
    ids, ahead, tokens = input_ids_ptr.numpy(), next_prefill_tokens_ptr.numpy(), all_token_ids_ptr.numpy()
    bounds = query_start_loc_ptr.tolist()
    for i, request in enumerate(idx_mapping_ptr.tolist()):
        length, start = int(prefill_lens_ptr[request]), int(num_computed_tokens_ptr[request])
        if start >= length:
            continue
        end = start + bounds[i + 1] - bounds[i]
        ids[bounds[i] : bounds[i + 1]] = tokens[request, start:end]
        following = tokens[request, end : min(end + num_lookahead, length)]
        ahead[:num_lookahead, request] = 0
        ahead[: len(following), request] = following


def prepare_pos_seq_lens(
    pos_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Write positions [T] and the length each request will have [max_num_reqs], 0 past the batch."""
    requests = idx_mapping_ptr.numpy()
    count = len(requests)
    bounds = query_start_loc_ptr.numpy()[: count + 1]
    computed, lengths = num_computed_tokens_ptr.numpy()[requests], bounds[1:] - bounds[:-1]
    seq_lens = seq_lens_ptr.numpy()
    seq_lens[:count] = computed + lengths
    seq_lens[count:max_num_reqs] = 0
    first, last = int(bounds[0]), int(bounds[-1])
    pos_ptr.numpy()[first:last] = np.arange(first, last) + np.repeat(computed - bounds[:-1], lengths)


def combine_sampled_and_draft_tokens(
    input_ids_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Write which rows of the batch need logits, logits_indices [logits], and, for requests past their prompt, the
    last sampled and the draft tokens into input_ids [T]."""
    ids, requests = input_ids_ptr.numpy(), idx_mapping_ptr.numpy()
    count = len(requests)
    bounds = cu_num_logits_ptr.numpy()[: count + 1]
    ends, lengths = query_start_loc_ptr.numpy()[1 : count + 1], seq_lens_ptr.numpy()[:count]
    logits, rows = bounds[1:] - bounds[:-1], slice(int(bounds[0]), int(bounds[-1]))
    starts = ends - logits
    logits_indices_ptr.numpy()[rows] = np.arange(rows.start, rows.stop) + np.repeat(starts - bounds[:-1], logits)
    prefill = prefill_len_ptr.numpy()[requests]
    if NUM_NEW_SAMPLED_TOKENS > 0:
        decoding = (lengths > prefill) & (lengths - logits >= prefill)
        ids[starts[decoding]] = last_sampled_tokens_ptr.view(-1).numpy()[requests[decoding]]
    drafts = np.where(lengths > prefill, logits - NUM_NEW_SAMPLED_TOKENS, 0)
    if drafts.any():
        step = np.arange(drafts.max())
        there = step < drafts[:, None]
        ids[((ends - drafts)[:, None] + step)[there]] = draft_tokens_ptr.numpy()[requests, : len(step)][there]


def get_num_sampled_and_rejected(
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
) -> None:
    """Correct num_sampled [R] and write num_rejected [R]: both 0 while a prompt is incomplete."""
    requests = idx_mapping_ptr.numpy()
    count = len(requests)
    complete = seq_lens_ptr.numpy()[:count] >= prefill_len_ptr.numpy()[requests]
    sampled = num_sampled_ptr.numpy()
    sampled[:count] *= complete
    bounds = cu_num_logits_ptr.numpy()[: count + 1]
    num_rejected_ptr.numpy()[:count] = (bounds[1:] - bounds[:-1] - sampled[:count]) * complete


def expand_idx_mapping(
    idx_mapping_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Write, for each row of logits, its request's index and its place among the request's rows."""
    requests = idx_mapping_ptr.numpy()
    bounds = cu_num_logits_ptr.numpy()[: len(requests) + 1]
    counts, rows = bounds[1:] - bounds[:-1], slice(int(bounds[0]), int(bounds[-1]))
    expanded_idx_mapping_ptr.numpy()[rows] = np.repeat(requests, counts)
    expanded_local_pos_ptr.numpy()[rows] = np.arange(rows.start, rows.stop) - np.repeat(bounds[:-1], counts)
