"""Block tables and staged writes."""

from typing import Any

import torch

from kernels.launch import Case, Launch, Random, addresses, bounds

REQUESTS, WIDTH = 7, 40


def one_table(random: Random, dtype: torch.dtype = torch.int32) -> Launch:
    count = random.integer(1, 6)
    lengths = random.integers(1, 20, count)
    table = random.integers(0, 99, REQUESTS, WIDTH, dtype=dtype)
    return Launch(
        (count, 3),
        {
            "output_ptr": table,
            "output_stride": table.stride(0),
            "write_indices_ptr": random.distinct(count, REQUESTS, torch.int32),
            "write_starts_ptr": random.integers(0, WIDTH - 20, count),
            "write_contents_ptr": random.integers(0, 999, int(lengths.sum()), dtype=dtype),
            "write_cu_lens_ptr": lengths.cumsum(0).int(),
            "write_group_ids_ptr": None,
            "BLOCK_SIZE": 8,
            "MULTI_GROUP": False,
        },
    )


def one_float_table(random: Random) -> Launch:
    return one_table(random, torch.float32)


def one_wide_table(random: Random) -> Launch:
    return one_table(random, torch.int64)


def several_tables(random: Random) -> Launch:
    launch = one_table(random)
    tables = [random.integers(0, 99, REQUESTS, width) for width in (WIDTH, WIDTH + 16, WIDTH + 32)]
    launch.args |= {
        "output_ptr": addresses(tables),
        "output_stride": torch.tensor([t.stride(0) for t in tables]),
        "write_group_ids_ptr": random.integers(0, 3, launch.grid[0]),
        "MULTI_GROUP": True,
    }
    launch.pointed_at = {f"table {i}": t for i, t in enumerate(tables)}
    return launch


def _tables(random: Random, widths: tuple[int, ...]) -> list[torch.Tensor]:
    return [random.integers(1, 99, REQUESTS, width) for width in widths]


def padded_batch(random: Random) -> Launch:
    widths = (24, 40, 8)
    sources, targets = _tables(random, widths), _tables(random, widths)
    counts = torch.stack([random.integers(0, width + 1, REQUESTS) for width in widths])
    batch = random.integer(1, 5)
    return Launch(
        (len(widths), batch + random.integer(0, 3)),
        {
            "batch_idx_to_req_idx": random.distinct(batch, REQUESTS),
            "src_block_table_ptrs": addresses(sources),
            "dst_block_table_ptrs": addresses(targets),
            "block_table_strides": torch.tensor(widths),
            "num_blocks_ptr": counts,
            "num_blocks_stride": counts.stride(0),
            "num_reqs": batch,
            "BLOCK_SIZE": 16,
        },
        {f"{kind} {i}": t for kind, ts in (("source", sources), ("target", targets)) for i, t in enumerate(ts)},
    )


def slots(random: Random, **parallel: Any) -> Launch:
    widths, sizes = (24, 40, 48), (16, 8, 4)
    tables = _tables(random, widths)
    lengths = random.integers(1, 30, random.integer(1, 5))
    total, capacity = int(lengths.sum()), int(lengths.sum()) + random.integer(0, 20)
    starts = random.integers(0, 80, len(lengths))
    slot_mappings = random.integers(0, 99, len(widths), capacity + 3, dtype=torch.int64)
    requests = random.distinct(len(lengths), REQUESTS)
    requests[random.integer(0, len(requests))] = random.choice([-1, 0], 1)[0]
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    return Launch(
        (len(widths), len(lengths) + 1),
        {
            "max_num_tokens": capacity,
            "idx_mapping": requests,
            "query_start_loc": bounds(lengths),
            "pos": torch.cat([torch.arange(start, start + length) for start, length in spans]),
            "block_table_ptrs": addresses(tables),
            "block_table_strides": torch.tensor(widths),
            "block_sizes": torch.tensor(sizes, dtype=torch.int32),
            "slot_mapping_enabled": torch.tensor([True, random.integer(0, 2) == 1, True]),
            "dcp_sharded": torch.tensor([True, True, random.integer(0, 2) == 1]),
            "slot_mappings_ptr": slot_mappings,
            "slot_mappings_stride": slot_mappings.stride(0),
            "cp_rank": parallel.get("rank", 0),
            "CP_SIZE": parallel.get("size", 1),
            "CP_INTERLEAVE": parallel.get("interleave", 1),
            "PAD_ID": -1,
            "TRITON_BLOCK_SIZE": 16,
        },
        {f"table {i}": t for i, t in enumerate(tables)} | {"total": torch.tensor(total)},
    )


def slots_of_one_rank(random: Random) -> Launch:
    return slots(random, rank=1, size=2, interleave=2)


CASES = (
    *(Case("buffer_utils._apply_write_kernel", make) for make in (one_table, one_float_table, one_wide_table)),
    Case("buffer_utils._apply_write_kernel", several_tables),
    Case("block_table._gather_block_tables_kernel", padded_batch),
    Case("block_table._compute_slot_mappings_kernel", slots),
    Case("block_table._compute_slot_mappings_kernel", slots_of_one_rank),
)
