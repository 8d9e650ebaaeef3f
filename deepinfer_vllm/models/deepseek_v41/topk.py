"""Top-k whose result does not depend on how the scores were batched: ties go to the lower index."""

import torch


def stable_topk(scores: torch.Tensor, k: int, *, in_order: bool = False) -> torch.Tensor:
    """Indices [n, k] of the k largest of scores [n, G] float32 (NaN not allowed), in no particular order; `in_order`,
    the largest first.

    `torch.topk` leaves ties open, and its choice can change with the shape. Here score and index are packed into one
    integer, so that no two entries are equal: the float's bits, made monotonic, above the reversed index.
    """
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    reversed_index = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    return torch.topk((ordered.long() << 32) | reversed_index, k, dim=-1, sorted=in_order).indices


def ascending(indices: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Sort [n, k] ascending with the invalid ones last and set to -1."""
    last = torch.iinfo(indices.dtype).max
    ordered = indices.masked_fill(~valid, last).sort(dim=-1).values
    return ordered.masked_fill(ordered == last, -1)
