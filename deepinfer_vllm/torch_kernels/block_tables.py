"""Block tables of a batch, and the cache slot of each of its tokens."""

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.torch_kernels.addresses import int32_table
from deepinfer_vllm.torch_kernels.registry import takes_grid


@takes_grid
def gather_block_tables(
    grid: tuple[int, ...],
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks_ptr: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    num_computed_tokens_ptr: torch.Tensor | None = None,
    sliding_window_reach_ptr: torch.Tensor | None = None,
    block_sizes_ptr: torch.Tensor | None = None,
    MASK_SLIDING_WINDOW: bool = False,
    BLOCK_SIZE: int = 1024,
) -> None:
    """Copy the batch's rows of every group's table [requests, blocks] to the front of its input table.

    The grid is (groups, rows to write): rows past the batch become 0, columns past a request's blocks stay. With
    MASK_SLIDING_WINDOW (vLLM 0.33) blocks that lie wholly below a request's window become 0 too.
    """
    groups, rows = grid
    requests = batch_idx_to_req_idx.numpy()
    counts, widths = num_blocks_ptr.numpy(), block_table_strides.tolist()
    sources, targets = src_block_table_ptrs.tolist(), dst_block_table_ptrs.tolist()
    for group in range(groups):
        source = int32_table(sources[group], counts.shape[1], widths[group])
        target = int32_table(targets[group], rows, widths[group])
        target[num_reqs:] = 0
        used = counts[group, requests]
        columns = np.arange(used.max(initial=0))
        blocks = source[requests, : len(columns)]
        if MASK_SLIDING_WINDOW:
            assert num_computed_tokens_ptr is not None
            assert sliding_window_reach_ptr is not None and block_sizes_ptr is not None
            reach, size = int(sliding_window_reach_ptr[group]), int(block_sizes_ptr[group])
            if reach > 0:
                below = (num_computed_tokens_ptr.numpy()[requests] - reach).clip(0) // size
                blocks[columns < below[:, None]] = 0
        np.copyto(target[:num_reqs, : len(columns)], blocks, where=columns < used[:, None])


@takes_grid
def compute_slot_mappings(
    grid: tuple[int, ...],
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slot_mappings_ptr: torch.Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Write slot_mappings [groups, max_num_tokens]: block * block size + offset, by each group's own block size.

    PAD_ID where a group has no slots, for requests of index -1, after the batch's last token, and for positions of
    another context-parallel rank. The grid is (groups, requests + 1).
    """
    groups, requests = grid[0], grid[1] - 1
    bounds = query_start_loc.numpy()[: requests + 1]
    total = int(bounds[-1])
    owner: NDArray[np.int64] = np.repeat(idx_mapping.numpy()[:requests], bounds[1:] - bounds[:-1])
    positions = pos.numpy()[bounds[0] : total]
    real, rows = owner >= 0, int(owner.max(initial=0)) + 1
    enabled, sharded = slot_mapping_enabled.tolist(), dcp_sharded.tolist()
    tables, widths, sizes = block_table_ptrs.tolist(), block_table_strides.tolist(), block_sizes.tolist()
    for group, slots in enumerate(slot_mappings_ptr.numpy()[:groups]):
        slots[total:max_num_tokens] = PAD_ID
        if not enabled[group]:
            slots[bounds[0] : total] = PAD_ID
            continue
        size, local, here = sizes[group], positions, real
        if CP_SIZE != 1 and sharded[group]:
            virtual, offset = np.divmod(positions, size * CP_SIZE)
            here = here & (offset // CP_INTERLEAVE % CP_SIZE == cp_rank)
            local = virtual * size + offset // (CP_INTERLEAVE * CP_SIZE) * CP_INTERLEAVE + offset % CP_INTERLEAVE
        table = int32_table(tables[group], rows, widths[group])
        block, offset = np.divmod(local, size)
        number = table[np.where(here, owner, 0), np.where(here, block, 0)].astype(np.int64)
        slots[bounds[0] : total] = np.where(here, number * size + offset, PAD_ID)
