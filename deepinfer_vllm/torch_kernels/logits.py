"""Changes to logits [T, vocabulary] in place, by the sampling parameters of each row's request."""

import math

import torch


def temperature(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Divide each row by its temperature; 0 means greedy and leaves it alone."""
    chosen = temperature_ptr[expanded_idx_mapping_ptr]
    logits_ptr.div_(torch.where(chosen == 0, 1, chosen).unsqueeze(-1))


def min_p(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Drop tokens less likely than min_p times the likeliest: below its logit plus log(min_p)."""
    least = min_p_ptr[expanded_idx_mapping_ptr]
    threshold = logits_ptr.amax(-1, keepdim=True) + least.log().unsqueeze(-1)  # -inf where min_p is 0
    logits_ptr.masked_fill_(logits_ptr < threshold, -math.inf)
