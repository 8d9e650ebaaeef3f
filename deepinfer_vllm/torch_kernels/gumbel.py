"""Sampling: the largest of logits plus Gumbel noise, in blocks of the vocabulary."""

import functools
import importlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.torch_kernels.murmur import uniform32, uniform64
from deepinfer_vllm.torch_kernels.winners import store_block_winners

DRAFT_SALT = 1 << 30
"""Added to positions when drafting, so that a draft and its verification do not share noise."""

CACHED_VALUES = 1 << 17


def gumbel_sample(
    local_argmax_ptr: torch.Tensor,
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """Write each row's winning token and value per block of BLOCK_SIZE tokens, local_argmax and local_max [T, blocks].

    Temperature 0 takes the plain maximum. With a logits cache [requests, columns, vocabulary] each row's source logits
    are stored at its request and column first.
    """
    requests = expanded_idx_mapping_ptr.numpy()
    known = requests >= 0
    heat = np.where(known, temp_ptr.numpy()[requests], np.float32(0))
    seeds = np.where(known, seeds_ptr.numpy()[requests], 0)
    if logits_cache_ptr is not None:
        assert logits_cache_col_ptr is not None and logits_cache_source_ptr is not None
        columns = np.broadcast_to(logits_cache_col_ptr.numpy().reshape(-1), requests.shape)
        target = torch.from_numpy(requests[known]).long(), torch.from_numpy(columns[known]).long()
        source = logits_cache_source_ptr[: len(requests)][torch.from_numpy(known), :vocab_size]
        logits_cache_ptr[..., :vocab_size].index_put_(target, source.to(logits_cache_ptr.dtype))
        if seeds_by_step():
            seeds = seeds ^ (columns.astype(np.int64) << 32)
    scores = logits_ptr.float().numpy()[:, :vocab_size]
    if USE_FP64:
        scores = scores.astype(np.float64)
    if heat.any():
        if APPLY_TEMPERATURE:
            plain = logits_ptr.float().numpy()[:, :vocab_size]
            scores = (plain / np.where(heat == 0, np.float32(1), heat)[:, None]).astype(scores.dtype, copy=False)
        elif not USE_FP64:
            scores = scores.copy()
        salt = DRAFT_SALT if IS_DRAFTING else 0
        add_noise(scores, heat, seeds.tolist(), (pos_ptr.numpy() + salt).tolist())
    store_block_winners(scores, BLOCK_SIZE, local_argmax_ptr.numpy(), local_max_ptr.numpy())


def add_noise(
    scores: NDArray[np.floating], heat: NDArray[np.float32], seeds: Sequence[int], positions: Sequence[int]
) -> None:
    """Add Gumbel noise to those rows of scores [N, V] whose temperature [N] is not 0, in place."""
    drawn, width = np.flatnonzero(heat).tolist(), scores.shape[1]
    for some in _in_cache(drawn, width):
        rows = slice(some[0], some[-1] + 1) if len(some) == some[-1] + 1 - some[0] else some
        scores[rows] += noise(
            [seeds[row] for row in some], [positions[row] for row in some], width, scores.dtype == np.float64
        )


def _in_cache(rows: list[int], width: int) -> Iterator[list[int]]:
    """The rows, as many at a time as make arrays that a core's cache holds."""
    count = max(1, CACHED_VALUES // width)
    for start in range(0, len(rows), count):
        yield rows[start : start + count]


def noise(seeds: Sequence[int], positions: Sequence[int], count: int, double: bool) -> NDArray[np.floating]:
    """[rows, count] Gumbel noise. In float32 the large values, which decide, come from uniforms near 0, where float32
    is fine enough, hence log(1 - u) by its series there."""
    if double:
        return -np.log(-np.log(uniform64(seeds, positions, count)))
    u = uniform32(seeds, positions, count)
    polynomial = np.full_like(u, 1 / 8)
    for order in (7, 6, 5, 4, 3, 2, 1):
        polynomial *= u
        polynomial += np.float32(1 / order)
    polynomial *= u
    direct = -np.log(np.maximum(np.float32(1) - u, np.float32(2**-24)))
    return -np.log(np.where(u < np.float32(0.25), polynomial, direct))


@functools.cache
def seeds_by_step() -> bool:
    """vLLM 0.33 mixes the draft's column into its seed."""
    return hasattr(importlib.import_module("vllm.v1.worker.gpu.sample.gumbel"), "spec_step_seed")
