"""Attention of each token over its own few rows: the sliding window and the selected compressed rows, with a sink.

The sink is a learned logit per head that takes part in the softmax and carries no value.
"""

import torch

WORKSPACE_BYTES = 64 << 20
"""Gathered rows and scores of one chunk of tokens; bounds memory, not the result."""


Rows = tuple[torch.Tensor, torch.Tensor]
"""Cached rows [slots, D], and for each token the slots of those it reads [T, n] int64, negative for none."""


def gather_attention(
    query: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """query [T, H, D], rows [T, N, D] as K and V, valid [T, N] bool, sink [H] float32 -> [T, H, D] float32.

    Rows that are not valid may hold any finite value. Softmax in float32.
    """
    rows = rows.float()
    scores = torch.bmm(query.float(), rows.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(~valid.unsqueeze(1), float("-inf"))
    sinks = sink.view(1, -1, 1).expand(scores.shape[0], -1, 1)
    weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    return torch.bmm(weights, rows)


def located_attention(
    query: torch.Tensor, window: Rows, selected: Rows | None, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same over cached rows, the window's and the selected: query [T, H, D] -> [T, H, D] float32.

    What a slot that no token reads holds, NaN too, does not matter.
    """
    parts = (window,) if selected is None else (window, selected)
    read = [rows.index_select(0, slots.clamp_min(0).flatten()).unflatten(0, slots.shape) for rows, slots in parts]
    valid = torch.cat([slots >= 0 for _, slots in parts], dim=1)
    rows = read[0] if selected is None else torch.cat(read, dim=1)
    rows.masked_fill_(~valid.unsqueeze(-1), 0)
    return gather_attention(query, rows, valid, sink, scale)


def tokens_per_chunk(num_rows: int, num_heads: int, head_dim: int) -> int:
    """How many tokens fit the workspace at `num_rows` rows each."""
    return max(1, WORKSPACE_BYTES // (4 * num_rows * (2 * head_dim + 2 * num_heads)))
