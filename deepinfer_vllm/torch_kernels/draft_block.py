"""What DFlash's and DSpark's draft models are fed: the target's tokens as context, and a block after each request."""

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.torch_kernels.registry import by_name


@by_name
def prepare_dflash_inputs(
    out_input_ids_ptr: torch.Tensor,
    out_query_positions_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor,
    out_seq_lens_ptr: torch.Tensor,
    out_query_slot_mapping_ptr: torch.Tensor,
    out_context_positions_ptr: torch.Tensor,
    out_context_slot_mapping_ptr: torch.Tensor,
    out_sample_indices_ptr: torch.Tensor,
    out_sample_pos_ptr: torch.Tensor,
    out_sample_idx_mapping_ptr: torch.Tensor,
    out_temperature_ptr: torch.Tensor,
    out_seeds_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    target_query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    BLOCK_SIZE: int,
    out_is_padding_ptr: torch.Tensor | None = None,
) -> None:
    """For each of R requests: positions and slots of its tokens of this step (context), and ids, positions and slots of
    its block of `num_query_per_req` tokens (queries): the last sampled token, then the drafting token.

    Rejected tokens at a request's end count as no context: position 0, no slot. A slot in block 0 is none either.
    Queries are sampled from at all places, or with SAMPLE_FROM_ANCHOR off at all but the first. What lies past the
    batch is set to do nothing; vLLM 0.33 marks it in `out_is_padding`.
    """
    requests, rejected = idx_mapping_ptr.numpy(), num_rejected_ptr.numpy()
    count, width, queries = len(requests), num_query_per_req, len(requests) * num_query_per_req
    bounds, positions = target_query_start_loc_ptr.numpy()[: count + 1], target_positions_ptr.numpy()
    tables, own = block_table_ptr.numpy(), np.arange(count)

    def slots(rows: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
        block, offset = np.divmod(at, block_size * CP_SIZE)
        number = tables[rows, np.minimum(block, block_table_stride - 1)].astype(np.int64)
        here = number != 0
        if CP_SIZE != 1:
            here &= offset // CP_INTERLEAVE % CP_SIZE == cp_rank
            offset = offset // (CP_INTERLEAVE * CP_SIZE) * CP_INTERLEAVE + offset % CP_INTERLEAVE
        return np.where(here, number * block_size + offset, PAD_SLOT_ID)

    begin, end = int(bounds[0]), int(bounds[-1])
    owner: NDArray[np.int64] = np.repeat(own, np.diff(bounds))
    stands = np.arange(begin, end) < (bounds[1:] - rejected)[owner]
    at = np.where(stands, positions[begin:end], 0)
    out_context_positions_ptr.numpy()[begin:end] = at
    out_context_slot_mapping_ptr.numpy()[begin:end] = np.where(stands, slots(owner, at), PAD_SLOT_ID)

    anchors = positions[bounds[1:] - rejected - 1] + 1
    at = anchors[:, None] + np.arange(width)
    ids, starts = out_input_ids_ptr.numpy(), np.arange(0, queries, width)
    sampled, ahead = last_sampled_ptr.numpy().reshape(-1), next_prefill_tokens_ptr.numpy().reshape(-1)
    ids[:queries] = parallel_drafting_token_id
    ids[starts] = np.where(num_sampled_ptr.numpy()[:count] > 0, sampled[requests], ahead[requests])
    out_query_positions_ptr.numpy()[:queries] = np.minimum(at, max_model_len - 1).reshape(-1)
    query_slots = out_query_slot_mapping_ptr.numpy()
    query_slots[:queries] = slots(own[:, None], at).reshape(-1)
    query_slots[queries:max_num_tokens] = PAD_SLOT_ID

    first, steps = 0 if SAMPLE_FROM_ANCHOR else 1, num_speculative_steps
    for out, values, rest in (
        (out_sample_indices_ptr, starts[:, None] + np.arange(first, width), 0),
        (out_sample_pos_ptr, at[:, first:] + (1 - first), 0),
        (out_sample_idx_mapping_ptr, np.repeat(requests[:, None], width - first, axis=1), -1),
    ):
        table = out.numpy()[: max_num_reqs * steps].reshape(max_num_reqs, steps)
        table[:count, : width - first], table[count:] = values, rest
    query_starts, seq_lens = out_query_start_loc_ptr.numpy(), out_seq_lens_ptr.numpy()
    query_starts[:count], query_starts[count : max_num_reqs + 1] = starts, queries
    seq_lens[:count], seq_lens[count:max_num_reqs] = np.minimum(anchors + width, max_model_len), 0
    out_temperature_ptr.numpy()[requests] = temperature_ptr.numpy()[requests]
    out_seeds_ptr.numpy()[requests] = seeds_ptr.numpy()[requests]
    if out_is_padding_ptr is not None:
        out_is_padding_ptr[:queries], out_is_padding_ptr[queries:max_num_tokens] = False, True
        ids[queries:max_num_tokens], out_query_positions_ptr.numpy()[queries:max_num_tokens] = 0, 0
