"""Thinking budgets: tokens of three kinds, so that markers are often met."""

from typing import Any

import torch

from kernels.cases.sampling import REQUESTS, rows
from kernels.launch import Case, Launch, Random

LENGTH = 40


def markers(random: Random) -> dict[str, torch.Tensor]:
    return {
        "reasoning_start_token_ids_ptr": random.integers(0, 3, random.integer(1, 3)),
        "natural_reasoning_end_token_ids_ptr": random.integers(0, 3, random.integer(1, 3)),
    }


def state(random: Random) -> dict[str, Any]:
    tokens = random.integers(0, 3, REQUESTS, LENGTH)
    return {
        "thinking_token_budget_ptr": torch.tensor(random.choice([-1, 0, 3, 9], REQUESTS), dtype=torch.int32),
        "all_token_ids_ptr": tokens,
        "all_token_ids_stride": tokens.stride(0),
        "total_len_ptr": random.integers(1, LENGTH, REQUESTS),
    }


def update(random: Random, cold: bool = False) -> Launch:
    requests, given = random.distinct(random.integer(1, REQUESTS), REQUESTS), markers(random)
    start, end = (len(marker) for marker in given.values())
    places = [random.integers(-1, 20, REQUESTS) for _ in "ab"]
    scans = random.integers(0, LENGTH, REQUESTS)
    if cold:
        places, scans = [torch.full((REQUESTS,), -1, dtype=torch.int32) for _ in "ab"], scans * 0
    return Launch(
        (len(requests),),
        {
            "req_ids_ptr": requests,
            **state(random),
            "cached_last_start_ptr": places[0],
            "cached_last_end_ptr": places[1],
            "cached_scan_pos_ptr": scans,
            **given,
            "START_LEN": start,
            "NATURAL_END_LEN": end,
            "MAX_LEN": max(start, end),
            "BLOCK": 8,
        },
    )


def first_update(random: Random) -> Launch:
    return update(random, cold=True)


def force(random: Random, drafts: bool = False) -> Launch:
    given, found = rows(random), markers(random)
    count = len(given["logits_ptr"])
    place = torch.zeros(count, dtype=torch.int32)
    if drafts:  # all rows are one request's
        place = torch.arange(count, dtype=torch.int32)
        given["expanded_idx_mapping_ptr"][:] = given["expanded_idx_mapping_ptr"][0].clone()
    forced = random.integers(0, 3, random.integer(1, 4))
    start, end = (len(marker) for marker in found.values())
    return Launch(
        (count,),
        {
            **given,
            **state(random),
            "input_ids_ptr": random.integers(0, 3, count),
            "expanded_local_pos_ptr": place,
            "cached_last_start_ptr": random.integers(-1, 30, REQUESTS),
            "cached_last_end_ptr": random.integers(-1, 20, REQUESTS),
            **found,
            "reasoning_end_token_ids_ptr": forced,
            "START_LEN": start,
            "NATURAL_END_LEN": end,
            "END_LEN": len(forced),
        },
    )


def force_among_drafts(random: Random) -> Launch:
    return force(random, drafts=True)


CASES = (
    *(Case("sample.thinking_budget._update_committed_marker_cache_kernel", make) for make in (update, first_update)),
    *(Case("sample.thinking_budget._thinking_budget_kernel", make) for make in (force, force_among_drafts)),
)
