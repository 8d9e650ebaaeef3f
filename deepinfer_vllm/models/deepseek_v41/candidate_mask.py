"""Which rows a token may select: those it sees and, where candidates were published for it, those of its blocks."""

import torch


def mask_scores(scores: torch.Tensor, visible: torch.Tensor, candidates: torch.Tensor | None, block_size: int) -> None:
    """Set the scores [t, G] float32 of all other rows to -inf, in place.

    visible [t] int64: the rows 0 <= g < visible are seen. candidates [t, P] int64: blocks of `block_size` rows, -1
    behind the last; a token with none may select from every block.
    """
    rows = torch.arange(scores.shape[-1], device=scores.device)
    scores.masked_fill_(rows >= visible.unsqueeze(-1), float("-inf"))
    if candidates is None or candidates.shape[-1] == 0:
        return
    num_blocks = -(-scores.shape[-1] // block_size)
    admitted = torch.zeros(scores.shape[0], num_blocks + 1, dtype=torch.bool, device=scores.device)
    admitted.scatter_(-1, torch.where(candidates < 0, num_blocks, candidates), True)
    admitted = admitted[:, :num_blocks] | (candidates < 0).all(dim=-1, keepdim=True)
    outside = ~admitted.repeat_interleave(block_size, dim=-1)[:, : scores.shape[-1]]
    scores.masked_fill_(outside, float("-inf"))
