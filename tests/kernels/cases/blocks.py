"""Clearing of cache blocks."""

import torch

from kernels.launch import Case, Launch, Random, addresses


def zero(random: Random) -> Launch:
    """Segments of different strides and sizes, one of them in the memory of another."""
    memory = [random.integers(1, 99, 7, 12), random.integers(1, 99, 7, 20)]
    segments = addresses([memory[0], memory[1], memory[1][:, 9:]])
    ids = random.distinct(random.integer(1, 5), 7)
    args = {
        "seg_addrs_ptr": segments,
        "seg_block_strides_ptr": torch.tensor([12, 20, 20]),
        "seg_page_sizes_ptr": torch.tensor([12, 5, 8]),
        "block_ids_ptr": ids,
        "BLOCK_SIZE": 4,
    }
    return Launch((len(ids), 3, 3), args, {"first": memory[0], "second": memory[1]})


CASES = (Case("vllm.v1.worker.utils._zero_kv_blocks_kernel", zero),)
