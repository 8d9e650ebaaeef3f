"""What runner V2 notes of a request once a step is done."""

import numpy as np
import torch


def post_update(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor | None = None,
    draft_tokens_out_ptr: torch.Tensor | None = None,
    num_draft_tokens: int = 0,
    num_warps: int = 1,
) -> None:
    """Append each request's sampled tokens to its ids, count them, and advance what is computed by what was not
    rejected. Requests of negative index are left alone. vLLM 0.33 stores the drafts of the next step here too."""
    sampled, ids = sampled_tokens_ptr.numpy(), all_token_ids_ptr.numpy()
    counts = None if output_bin_counts_ptr is None else output_bin_counts_ptr.numpy()
    computed, last, total = num_computed_tokens_ptr.numpy(), last_sampled_tokens_ptr.numpy(), total_len_ptr.numpy()
    rejected = num_rejected_ptr.tolist()
    bounds = None if query_start_loc_ptr is None else query_start_loc_ptr.tolist()
    for i, (request, new) in enumerate(zip(idx_mapping_ptr.tolist(), num_sampled_ptr.tolist(), strict=True)):
        if request < 0:
            continue
        if draft_tokens_ptr is not None:
            assert draft_tokens_out_ptr is not None
            draft_tokens_out_ptr[request, :num_draft_tokens] = draft_tokens_ptr[i, :num_draft_tokens]
        if new > 0:
            start = int(total[request])
            tokens = sampled[i, :new]
            ids[request, start : start + new] = tokens
            last[request], total[request] = tokens[-1], start + new
            if counts is not None:
                np.add.at(counts[request], tokens, 1)
        length = 0 if bounds is None else bounds[i + 1] - bounds[i]
        computed[request] += length - rejected[i]


def post_update_num_computed_tokens(
    idx_mapping_ptr: torch.Tensor, num_computed_tokens_ptr: torch.Tensor, query_start_loc_ptr: torch.Tensor
) -> None:
    """Advance each request by its tokens of this step."""
    requests = idx_mapping_ptr.numpy()
    np.add.at(num_computed_tokens_ptr.numpy(), requests, np.diff(query_start_loc_ptr.numpy()[: len(requests) + 1]))
