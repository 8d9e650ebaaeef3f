"""Logprobs and ranks."""

import torch

from kernels.cases.sampling import BLOCK, REQUESTS, VOCABULARY, rows
from kernels.launch import Case, Launch, Random, bounds


def log_softmax(random: Random) -> Launch:
    given = rows(random)
    count, chosen = len(given["logits_ptr"]), random.integer(1, 6)
    ids = random.integers(0, VOCABULARY, count, chosen, dtype=torch.int64)
    return Launch(
        (count,),
        {
            "output_ptr": torch.zeros(count, chosen),
            "logits_ptr": given["logits_ptr"],
            "logits_stride": given["logits_stride"],
            "topk_ids_ptr": ids,
            "topk_ids_stride": ids.stride(0),
            "topk": chosen,
            "vocab_size": VOCABULARY,
            "BLOCK_SIZE": BLOCK,
            "TOPK_BLOCK_SIZE": 4,
        },
    )


def ranks(random: Random) -> Launch:
    given = rows(random)
    count = len(given["logits_ptr"])
    return Launch(
        (count,),
        {
            "output_ptr": torch.zeros(count, dtype=torch.int64),
            "logits_ptr": given["logits_ptr"].round(),  # ties
            "logits_stride": given["logits_stride"],
            "token_ids_ptr": random.integers(0, VOCABULARY, count, dtype=torch.int64),
            "vocab_size": VOCABULARY,
            "BLOCK_SIZE": BLOCK,
        },
    )


def token_ids(random: Random, most_likely: int = 3) -> Launch:
    count, columns = random.integer(1, 6), 6
    out, valid = torch.zeros(count, 1 + columns, dtype=torch.int64), torch.zeros(count, 1 + columns, dtype=torch.bool)
    likely, named = random.integers(0, 99, count, 3), random.integers(100, 199, REQUESTS, 8)
    return Launch(
        (count,),
        {
            "out_token_ids_ptr": out,
            "out_token_ids_stride": out.stride(0),
            "out_valid_mask_ptr": valid,
            "out_valid_mask_stride": valid.stride(0),
            "sampled_token_ids_ptr": random.integers(0, 99, count, dtype=torch.int64),
            "topk_indices_ptr": likely,
            "topk_indices_stride": likely.stride(0),
            "expanded_idx_mapping_ptr": random.integers(0, REQUESTS, count, dtype=torch.int64),
            "num_per_req_token_ids_ptr": torch.tensor(random.choice([0, 2, 6], REQUESTS), dtype=torch.int32),
            "per_req_token_ids_ptr": named,
            "per_req_token_ids_stride": named.stride(0),
            "NUM_TOPK": most_likely,
            "PADDED_COLS": 8,
        },
    )


def named_token_ids(random: Random) -> Launch:
    return token_ids(random, most_likely=0)


def following(random: Random) -> Launch:
    lengths = random.integers(1, 20, random.integer(1, 6))
    tokens = random.integers(0, 999, REQUESTS, 48)
    return Launch(
        (len(lengths),),
        {
            "prompt_logprobs_token_ids_ptr": torch.zeros(int(lengths.sum()), dtype=torch.int64),
            "query_start_loc_ptr": bounds(lengths),
            "idx_mapping_ptr": random.distinct(len(lengths), REQUESTS),
            "num_computed_tokens_ptr": random.integers(0, 27, REQUESTS),
            "all_token_ids_ptr": tokens,
            "all_token_ids_stride": tokens.stride(0),
            "BLOCK_SIZE": 8,
        },
    )


CASES = (
    Case("sample.logprob._topk_log_softmax_kernel", log_softmax, tolerance=1e-6),
    Case("sample.logprob._ranks_kernel", ranks),
    *(Case("sample.logprob._fill_logprob_token_ids_kernel", make) for make in (token_ids, named_token_ids)),
    Case("sample.prompt_logprob._prompt_logprobs_token_ids_kernel", following),
)
