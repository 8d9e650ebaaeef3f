"""Sampling: temperature, min-p, Gumbel noise."""

from typing import Any

import torch

from kernels.launch import Case, Launch, Random

REQUESTS, VOCABULARY, BLOCK = 6, 300, 64


def rows(random: Random) -> dict[str, Any]:
    """Logits of a few rows, some of them -inf, and the request of each row."""
    logits = random.normal(random.integer(1, 6), VOCABULARY) * 4
    logits[random.normal(*logits.shape) > 1.5] = -torch.inf
    return {
        "logits_ptr": logits,
        "logits_stride": logits.stride(0),
        "expanded_idx_mapping_ptr": random.integers(0, REQUESTS, len(logits), dtype=torch.int64),
    }


def temperatures(random: Random) -> torch.Tensor:
    return torch.tensor(random.choice([0.0, 1.0, 0.3, 1.7], REQUESTS))


def temperature(random: Random) -> Launch:
    args = rows(random) | {
        "temperature_ptr": temperatures(random),
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": BLOCK,
    }
    return Launch((len(args["logits_ptr"]), -(-VOCABULARY // BLOCK)), args)


def min_p(random: Random) -> Launch:
    least = torch.tensor(random.choice([0.0, 0.05, 0.5, 1.0], REQUESTS))
    args = rows(random) | {"min_p_ptr": least, "vocab_size": VOCABULARY, "BLOCK_SIZE": BLOCK}
    return Launch((len(args["logits_ptr"]),), args)


def draw(random: Random, *, double: bool = False, apply: bool = False, **cache: Any) -> Launch:
    given = rows(random)
    count, blocks = len(given["logits_ptr"]), -(-VOCABULARY // BLOCK)
    maxima = torch.zeros(count, blocks, dtype=torch.float64 if double else torch.float32)
    winners = torch.zeros(count, blocks, dtype=torch.int64)
    args = {
        "local_argmax_ptr": winners,
        "local_argmax_stride": winners.stride(0),
        "local_max_ptr": maxima,
        "local_max_stride": maxima.stride(0),
        "logits_cache_ptr": None,
        "logits_cache_stride_0": 0,
        "logits_cache_stride_1": 0,
        "logits_cache_col_ptr": None,
        "logits_cache_source_ptr": None,
        "logits_cache_source_stride": 0,
        **given,
        "seeds_ptr": torch.randint(-(2**63), 2**63 - 1, (REQUESTS,), generator=random.generator),
        "pos_ptr": random.integers(0, 2**20, count, dtype=torch.int64),
        "temp_ptr": temperatures(random),
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": BLOCK,
        "IS_DRAFTING": bool(cache),
        "APPLY_TEMPERATURE": apply,
        "USE_FP64": double,
        "PER_TOKEN_COL": False,
    }
    return Launch((count, blocks), args | cache)


def sample(random: Random) -> Launch:
    return draw(random)


def sample_in_double(random: Random) -> Launch:
    return draw(random, double=True, apply=True)


def draft(random: Random, per_token: bool = False) -> Launch:
    cache = random.normal(REQUESTS, 3, VOCABULARY + 4)
    launch = draw(random, apply=True, logits_cache_ptr=cache)
    count = launch.grid[0]
    source = random.normal(count, VOCABULARY)
    requests = random.distinct(count, REQUESTS)
    requests[0] = random.choice([-1, int(requests[0])], 1)[0]
    launch.args |= {
        "expanded_idx_mapping_ptr": requests,
        "logits_cache_stride_0": cache.stride(0),
        "logits_cache_stride_1": cache.stride(1),
        "logits_cache_col_ptr": random.integers(0, 3, count) if per_token else random.integers(0, 3, 1).squeeze(),
        "logits_cache_source_ptr": source,
        "logits_cache_source_stride": source.stride(0),
        "PER_TOKEN_COL": per_token,
    }
    return launch


def draft_at_own_columns(random: Random) -> Launch:
    return draft(random, per_token=True)


CASES = (
    Case("sample.gumbel._temperature_kernel", temperature),
    Case("sample.min_p._min_p_kernel", min_p),
    *(
        Case("sample.gumbel._gumbel_sample_kernel", make, tolerance=2e-6)
        for make in (sample, sample_in_double, draft, draft_at_own_columns)
    ),
)
