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
    requests = idx_mapping_ptr.tolist()
    bounds, positions = target_query_start_loc_ptr.tolist(), target_positions_ptr.numpy()
    tables, width = block_table_ptr.numpy(), num_query_per_req
    context_positions, context_slots = out_context_positions_ptr.numpy(), out_context_slot_mapping_ptr.numpy()
    ids, query_positions = out_input_ids_ptr.numpy(), out_query_positions_ptr.numpy()
    query_slots = out_query_slot_mapping_ptr.numpy()
    sample_indices, sample_pos = out_sample_indices_ptr.numpy(), out_sample_pos_ptr.numpy()
    sample_requests = out_sample_idx_mapping_ptr.numpy()
    starts, seq_lens = out_query_start_loc_ptr.numpy(), out_seq_lens_ptr.numpy()

    def slots(row: int, at: NDArray[np.int64]) -> NDArray[np.int64]:
        block, offset = np.divmod(at, block_size * CP_SIZE)
        number = tables[row, np.minimum(block, block_table_stride - 1)].astype(np.int64)
        here = number != 0
        if CP_SIZE != 1:
            here &= offset // CP_INTERLEAVE % CP_SIZE == cp_rank
            offset = offset // (CP_INTERLEAVE * CP_SIZE) * CP_INTERLEAVE + offset % CP_INTERLEAVE
        return np.where(here, number * block_size + offset, PAD_SLOT_ID)

    first = 0 if SAMPLE_FROM_ANCHOR else 1
    for row, request in enumerate(requests):
        begin, end = bounds[row], bounds[row + 1]
        valid = end - int(num_rejected_ptr[row])
        context_positions[begin:valid] = positions[begin:valid]
        context_slots[begin:valid] = slots(row, positions[begin:valid])
        context_positions[valid:end], context_slots[valid:end] = 0, PAD_SLOT_ID

        anchor = int(positions[valid - 1]) + 1
        at = np.arange(anchor, anchor + width)
        block = slice(row * width, (row + 1) * width)
        source = last_sampled_ptr if num_sampled_ptr[row] > 0 else next_prefill_tokens_ptr
        ids[block] = parallel_drafting_token_id
        ids[block.start] = int(source.view(-1)[request])
        query_positions[block] = np.minimum(at, max_model_len - 1)
        query_slots[block] = slots(row, at)

        sampled = slice(row * num_speculative_steps, row * num_speculative_steps + width - first)
        sample_indices[sampled] = np.arange(block.start + first, block.stop)
        sample_pos[sampled] = at[first:] + (1 - first)
        sample_requests[sampled] = request
        starts[row] = block.start
        seq_lens[row] = min(anchor + width, max_model_len)
        out_temperature_ptr[request] = temperature_ptr[request]
        out_seeds_ptr[request] = seeds_ptr[request]

    count, queries = len(requests), len(requests) * width
    starts[count : max_num_reqs + 1] = queries
    seq_lens[count:max_num_reqs] = 0
    unused = slice(count * num_speculative_steps, max_num_reqs * num_speculative_steps)
    sample_indices[unused], sample_pos[unused], sample_requests[unused] = 0, 0, -1
    query_slots[queries:max_num_tokens] = PAD_SLOT_ID
    if out_is_padding_ptr is not None:
        out_is_padding_ptr[:queries], out_is_padding_ptr[queries:max_num_tokens] = False, True
        ids[queries:max_num_tokens], query_positions[queries:max_num_tokens] = 0, 0
