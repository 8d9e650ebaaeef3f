"""What sampling parameters and grammars do to logits."""

import torch

from kernels.cases.sampling import BLOCK, REQUESTS, VOCABULARY, rows
from kernels.launch import Case, Launch, Random, bounds

LENGTH = 48


def masks(random: Random, count: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (count, -(-VOCABULARY // 32)), generator=random.generator).int()


def token_rows(random: Random) -> torch.Tensor:
    return random.integers(0, VOCABULARY, REQUESTS, LENGTH)


def penalties(random: Random, drafts: int = 0) -> Launch:
    given = rows(random)
    count = len(given["logits_ptr"])
    counts = random.integers(-3, 3, REQUESTS, VOCABULARY).clamp_min(0)
    bits = masks(random, REQUESTS)
    place = torch.zeros(count, dtype=torch.int32)
    if drafts:  # all rows are one request's
        place = torch.arange(count, dtype=torch.int32)
        given["expanded_idx_mapping_ptr"][:] = given["expanded_idx_mapping_ptr"][0].clone()
    return Launch(
        (count, -(-VOCABULARY // BLOCK)),
        given
        | {
            "token_ids_ptr": random.integers(0, VOCABULARY, count),
            "expanded_local_pos_ptr": place,
            "repetition_penalty_ptr": torch.tensor(random.choice([1.0, 1.3, 0.7], REQUESTS)),
            "frequency_penalty_ptr": torch.tensor(random.choice([0.0, 0.2, -0.1], REQUESTS)),
            "presence_penalty_ptr": torch.tensor(random.choice([0.0, 0.4], REQUESTS)),
            "prompt_bin_mask_ptr": bits,
            "prompt_bin_mask_stride": bits.stride(0),
            "output_bin_counts_ptr": counts,
            "output_bin_counts_stride": counts.stride(0),
            "vocab_size": VOCABULARY,
            "BLOCK_SIZE": BLOCK,
        },
    )


def penalties_of_drafts(random: Random) -> Launch:
    return penalties(random, drafts=1)


def count_tokens(random: Random) -> Launch:
    requests = random.distinct(random.integer(1, 5), REQUESTS)
    tokens, bits = token_rows(random), masks(random, REQUESTS)
    counts = random.integers(0, 3, REQUESTS, VOCABULARY)
    prompts = random.integers(1, LENGTH // 2, REQUESTS)
    return Launch(
        (len(requests), -(-LENGTH // 16)),
        {
            "expanded_idx_mapping_ptr": requests,
            "all_token_ids_ptr": tokens,
            "all_token_ids_stride": tokens.stride(0),
            "prompt_len_ptr": prompts,
            "prefill_len_ptr": prompts + random.integers(0, LENGTH // 2, REQUESTS),
            "prompt_bin_mask_ptr": bits,
            "prompt_bin_mask_stride": bits.stride(0),
            "output_bin_counts_ptr": counts,
            "output_bin_counts_stride": counts.stride(0),
            "BLOCK_SIZE": 16,
        },
    )


def bias(random: Random, check: bool = False) -> Launch:
    given = rows(random)
    width = 8
    distinct = [torch.stack([random.distinct(width, VOCABULARY, torch.int32) for _ in range(REQUESTS)]) for _ in "abc"]
    allowed, biased, stops = distinct
    biases = random.normal(REQUESTS, width)
    allowed_counts = torch.tensor(random.choice([0, 0, 3, 8], REQUESTS), dtype=torch.int32)
    if check:  # of some requests only stop tokens are allowed
        allowed[::2] = stops[::2]
    order = {
        "logits_ptr": given["logits_ptr"],
        "logits_stride": given["logits_stride"],
        "vocab_size": VOCABULARY,
        "expanded_idx_mapping_ptr": given["expanded_idx_mapping_ptr"],
        "num_allowed_token_ids_ptr": allowed_counts,
        "allowed_token_ids_ptr": allowed,
        "allowed_token_ids_stride": allowed.stride(0),
        "num_logit_bias_ptr": torch.tensor(random.choice([0, 1, 8], REQUESTS), dtype=torch.int32),
        "bias_token_ids_ptr": biased,
        "bias_token_ids_stride": biased.stride(0),
        "bias_ptr": biases,
        "bias_stride": biases.stride(0),
        "pos_ptr": random.integers(0, 20, len(given["logits_ptr"]), dtype=torch.int64),
        "min_lens_ptr": random.integers(0, 30, REQUESTS),
        "num_stop_token_ids_ptr": torch.tensor(random.choice([0, 2, 8], REQUESTS), dtype=torch.int32),
        "restore_when_all_masked_ptr": random.integers(0, 2, REQUESTS),
        "stop_token_ids_ptr": stops,
        "stop_token_ids_stride": stops.stride(0),
        "BLOCK_SIZE": width,
        "LOGITS_BLOCK_SIZE": BLOCK,
        "CHECK_ALL_MASKED_ROWS": check,
    }
    return Launch((len(given["logits_ptr"]),), order)


def bias_with_restored_stops(random: Random) -> Launch:
    return bias(random, check=True)


def bad_words(random: Random, drafts: bool = False) -> Launch:
    given = rows(random)
    count = len(given["logits_ptr"])
    given["logits_ptr"].nan_to_num_(neginf=-9.0)
    prompts = random.integers(1, 20, REQUESTS)
    tokens = random.integers(0, 2, REQUESTS, LENGTH)  # of two kinds, so that words are often met
    lengths = random.integers(1, 4, REQUESTS, 5)
    offsets = torch.stack([bounds(row) for row in lengths])
    words = random.integers(0, 2, REQUESTS, 20)
    place = torch.zeros(count, dtype=torch.int32)
    if drafts:
        place = torch.arange(count, dtype=torch.int32)
        given["expanded_idx_mapping_ptr"][:] = given["expanded_idx_mapping_ptr"][0].clone()
    return Launch(
        (count, 5),
        given
        | {
            "bad_word_token_ids_ptr": words,
            "bad_word_token_ids_stride": words.stride(0),
            "bad_word_offsets_ptr": offsets,
            "bad_word_offsets_stride": offsets.stride(0),
            "num_bad_words_ptr": random.integers(0, 6, REQUESTS),
            "all_token_ids_ptr": tokens,
            "all_token_ids_stride": tokens.stride(0),
            "prompt_len_ptr": prompts,
            "total_len_ptr": prompts + random.integers(0, 6, REQUESTS),
            "input_ids_ptr": random.integers(0, 2, count),
            "expanded_local_pos_ptr": place,
        },
    )


def bad_words_across_drafts(random: Random) -> Launch:
    return bad_words(random, drafts=True)


def grammar(random: Random) -> Launch:
    stride = 3
    counts = random.integers(1, stride + 1, random.integer(1, 4))
    logits = random.normal(int(counts.sum()), VOCABULARY)
    places = random.distinct(random.integer(1, len(counts) * stride + 1), len(counts) * stride, torch.int32)
    bits = masks(random, len(places))
    return Launch(
        (len(places), -(-VOCABULARY // 64)),
        {
            "logits_ptr": logits,
            "logits_stride": logits.stride(0),
            "logits_indices_ptr": places,
            "cu_num_logits_ptr": bounds(counts),
            "bitmask_ptr": bits,
            "bitmask_stride": bits.stride(0),
            "vocab_size": VOCABULARY,
            "MASK_STRIDE": stride,
            "BLOCK_SIZE": 64,
        },
    )


def nans(random: Random) -> Launch:
    given = rows(random)
    logits = given["logits_ptr"]
    logits[random.normal(*logits.shape) > 1] = torch.nan
    return Launch(
        (len(logits),),
        {
            "logits_ptr": logits,
            "logits_stride": logits.stride(0),
            "num_nans_ptr": random.integers(0, 9, len(logits)),
            "vocab_size": VOCABULARY,
            "BLOCK_SIZE": BLOCK,
        },
    )


CASES = (
    *(Case("sample.penalties._penalties_kernel", make) for make in (penalties, penalties_of_drafts)),
    Case("sample.penalties._bincount_kernel", count_tokens),
    *(Case("sample.logit_bias._bias_kernel", make) for make in (bias, bias_with_restored_stops)),
    *(Case("sample.bad_words._bad_words_kernel", make) for make in (bad_words, bad_words_across_drafts)),
    Case("structured_outputs._apply_grammar_bitmask_kernel", grammar),
    Case("metrics.logits._num_nans_kernel", nans),
)
