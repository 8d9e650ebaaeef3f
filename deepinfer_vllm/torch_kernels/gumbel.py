"""Sampling: the largest of logits plus Gumbel noise, in blocks of the vocabulary."""

import functools
import importlib

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_vllm.torch_kernels.murmur import uniform32, uniform64

DRAFT_SALT = 1 << 30
"""Added to positions when drafting, so that a draft and its verification do not share noise."""


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
    requests, positions = expanded_idx_mapping_ptr.tolist(), pos_ptr.tolist()
    values = logits_ptr.float().numpy()
    winners, maxima = local_argmax_ptr.numpy(), local_max_ptr.numpy()
    for row, request in enumerate(requests):
        column = 0
        if logits_cache_ptr is not None:
            assert logits_cache_col_ptr is not None and logits_cache_source_ptr is not None
            column = int(logits_cache_col_ptr.view(-1)[row if PER_TOKEN_COL else 0])
            if request >= 0:
                logits_cache_ptr[request, column, :vocab_size] = logits_cache_source_ptr[row]
        temperature = float(temp_ptr[request]) if request >= 0 else 0.0
        seed = int(seeds_ptr[request]) if request >= 0 else 0
        if logits_cache_ptr is not None and seeds_by_step():
            seed ^= column << 32
        scores = values[row]
        if temperature != 0.0:
            if APPLY_TEMPERATURE:
                scores = scores / np.float32(temperature)
            scores = scores + noise(seed, positions[row] + DRAFT_SALT * IS_DRAFTING, vocab_size, USE_FP64)
        for block, start in enumerate(range(0, vocab_size, BLOCK_SIZE)):
            best = start + int(scores[start : start + BLOCK_SIZE].argmax())
            winners[row, block], maxima[row, block] = best, scores[best]


def noise(seed: int, position: int, count: int, double: bool) -> NDArray[np.floating]:
    """[count] Gumbel noise. In float32 the large values, which decide, come from uniforms near 0, where float32 is fine
    enough, hence log(1 - u) by its series there."""
    if double:
        return -np.log(-np.log(uniform64(seed, position, count)))
    u = uniform32(seed, position, count)
    polynomial = np.full_like(u, 1 / 8)
    for order in (7, 6, 5, 4, 3, 2, 1):
        polynomial = np.float32(1 / order) + u * polynomial
    direct = np.log(np.maximum(np.float32(1) - u, np.float32(2**-24)))
    return -np.log(np.where(u < np.float32(0.25), u * polynomial, -direct))


@functools.cache
def seeds_by_step() -> bool:
    """vLLM 0.33 mixes the draft's column into its seed."""
    return hasattr(importlib.import_module("vllm.v1.worker.gpu.sample.gumbel"), "spec_step_seed")
