"""Inputs of a step, and what is noted after it."""

import torch

from kernels.launch import Case, Launch, Random, bounds

REQUESTS, LENGTH = 9, 64


def prefill(random: Random) -> Launch:
    lengths = random.integers(1, 20, random.integer(1, 6))
    ahead = random.integers(0, 99, random.integer(1, 4), REQUESTS)
    tokens = random.integers(100, 999, REQUESTS, LENGTH)
    return Launch(
        (len(lengths),),
        {
            "input_ids_ptr": random.integers(0, 99, int(lengths.sum()) + 3),
            "next_prefill_tokens_ptr": ahead,
            "next_prefill_tokens_stride": ahead.stride(0),
            "num_lookahead": len(ahead),
            "idx_mapping_ptr": random.distinct(len(lengths), REQUESTS),
            "query_start_loc_ptr": bounds(lengths),
            "all_token_ids_ptr": tokens,
            "all_token_ids_stride": tokens.stride(0),
            "prefill_lens_ptr": random.integers(20, 45, REQUESTS),
            "num_computed_tokens_ptr": random.integers(0, 40, REQUESTS),
            "BLOCK_SIZE": 8,
            "LOOKAHEAD_BLOCK": 4,
        },
    )


def positions(random: Random) -> Launch:
    lengths = random.integers(1, 20, random.integer(1, 6))
    total = int(lengths.sum())
    return Launch(
        (len(lengths) + 1,),
        {
            "pos_ptr": random.integers(0, 99, total + 3, dtype=torch.int64),
            "seq_lens_ptr": random.integers(0, 99, REQUESTS),
            "idx_mapping_ptr": random.distinct(len(lengths), REQUESTS),
            "query_start_loc_ptr": torch.cat([bounds(lengths), torch.full((3,), total, dtype=torch.int32)]),
            "num_computed_tokens_ptr": random.integers(0, 99, REQUESTS),
            "max_num_reqs": REQUESTS,
            "BLOCK_SIZE": 4,
        },
    )


def combine(random: Random, new: int, steps: int) -> Launch:
    logits = random.integers(0, steps + 1, random.integer(1, 6)) + new
    lengths = logits + random.integers(1 - new, 9, len(logits))
    drafts = random.integers(0, 99, REQUESTS, max(steps, 1), dtype=torch.int64)
    return Launch(
        (len(logits),),
        {
            "input_ids_ptr": random.integers(0, 99, int(lengths.sum())),
            "idx_mapping_ptr": random.distinct(len(logits), REQUESTS),
            "last_sampled_tokens_ptr": random.integers(100, 199, REQUESTS, 1, dtype=torch.int64),
            "query_start_loc_ptr": bounds(lengths),
            "seq_lens_ptr": lengths + random.integers(0, 30, len(lengths)),
            "prefill_len_ptr": random.integers(5, 30, REQUESTS),
            "draft_tokens_ptr": drafts,
            "draft_tokens_stride": drafts.stride(0),
            "cu_num_logits_ptr": bounds(logits),
            "logits_indices_ptr": random.integers(0, 99, int(logits.sum()), dtype=torch.int64),
            "BLOCK_SIZE": 8,
            "NUM_NEW_SAMPLED_TOKENS": new,
        },
    )


def without_drafts(random: Random) -> Launch:
    return combine(random, new=1, steps=0)


def with_drafts(random: Random) -> Launch:
    return combine(random, new=1, steps=5)


def only_drafts(random: Random) -> Launch:
    return combine(random, new=0, steps=5)


def sampled(random: Random) -> Launch:
    logits = random.integers(1, 5, random.integer(1, 6))
    return Launch(
        (len(logits),),
        {
            "num_sampled_ptr": torch.minimum(random.integers(1, 5, len(logits)), logits),
            "num_rejected_ptr": random.integers(50, 99, len(logits)),
            "seq_lens_ptr": random.integers(5, 30, len(logits)),
            "cu_num_logits_ptr": bounds(logits),
            "idx_mapping_ptr": random.distinct(len(logits), REQUESTS),
            "prefill_len_ptr": random.integers(5, 30, REQUESTS),
        },
    )


def expand(random: Random) -> Launch:
    logits = random.integers(1, 5, random.integer(1, 6))
    return Launch(
        (len(logits),),
        {
            "idx_mapping_ptr": random.distinct(len(logits), REQUESTS),
            "expanded_idx_mapping_ptr": random.integers(0, 99, int(logits.sum()), dtype=torch.int64),
            "expanded_local_pos_ptr": random.integers(0, 99, int(logits.sum())),
            "cu_num_logits_ptr": bounds(logits),
            "BLOCK_SIZE": 8,
        },
    )


def update(random: Random) -> Launch:
    count, vocabulary, steps = random.integer(1, 6), 20, 4
    new = random.integers(0, steps + 1, count)
    counts, tokens = random.integers(0, 5, REQUESTS, vocabulary), random.integers(0, 99, REQUESTS, LENGTH)
    sampled_tokens = random.integers(0, vocabulary, count, steps, dtype=torch.int64)
    requests = random.distinct(count, REQUESTS)
    requests[random.integer(0, count)] = random.choice([-1, 0], 1)[0]
    requests[(requests == 0).nonzero().flatten()[1:]] = -1  # no request twice
    return Launch(
        (count,),
        {
            "idx_mapping_ptr": requests,
            "num_computed_tokens_ptr": random.integers(0, 99, REQUESTS),
            "last_sampled_tokens_ptr": random.integers(0, 99, REQUESTS, 1, dtype=torch.int64),
            "output_bin_counts_ptr": counts,
            "output_bin_counts_stride": counts.stride(0),
            "sampled_tokens_ptr": sampled_tokens,
            "sampled_tokens_stride": sampled_tokens.stride(0),
            "num_sampled_ptr": new,
            "num_rejected_ptr": random.integers(0, 3, count),
            "query_start_loc_ptr": bounds(random.integers(1, 9, count)),
            "all_token_ids_ptr": tokens,
            "all_token_ids_stride": tokens.stride(0),
            "total_len_ptr": random.integers(0, LENGTH - steps, REQUESTS),
        },
    )


def update_on_another_rank(random: Random) -> Launch:
    launch = update(random)
    launch.args |= {"output_bin_counts_ptr": None, "output_bin_counts_stride": 0, "query_start_loc_ptr": None}
    return launch


def update_computed(random: Random) -> Launch:
    lengths = random.integers(1, 9, random.integer(1, 6))
    return Launch(
        (len(lengths),),
        {
            "idx_mapping_ptr": random.distinct(len(lengths), REQUESTS),
            "num_computed_tokens_ptr": random.integers(0, 99, REQUESTS),
            "query_start_loc_ptr": bounds(lengths),
        },
    )


CASES = (
    Case("input_batch._prepare_prefill_inputs_kernel", prefill),
    Case("input_batch._prepare_pos_seq_lens_kernel", positions),
    *(
        Case("input_batch._combine_sampled_and_draft_tokens_kernel", make)
        for make in (without_drafts, with_drafts, only_drafts)
    ),
    Case("input_batch._get_num_sampled_and_rejected_kernel", sampled),
    Case("input_batch._expand_idx_mapping_kernel", expand),
    Case("input_batch._post_update_kernel", update),
    Case("input_batch._post_update_kernel", update_on_another_rank),
    Case("input_batch._post_update_num_computed_tokens_kernel", update_computed),
)
