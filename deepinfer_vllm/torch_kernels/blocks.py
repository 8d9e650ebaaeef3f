"""Fresh cache blocks, cleared of what an earlier request left in them."""

import ctypes

import torch


def zero_kv_blocks(
    seg_addrs_ptr: torch.Tensor,
    seg_block_strides_ptr: torch.Tensor,
    seg_page_sizes_ptr: torch.Tensor,
    block_ids_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Zero the blocks in every segment, which has an address, and a stride and a size of its blocks in 4-byte words."""
    for address, stride, size in zip(
        seg_addrs_ptr.tolist(), seg_block_strides_ptr.tolist(), seg_page_sizes_ptr.tolist(), strict=True
    ):
        for block in block_ids_ptr.tolist():
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)
