"""The compressor of a KV source: one latent row for each `ratio` tokens."""

from __future__ import annotations

import torch

from reference.layers import linear, rms_norm


def compress(x: torch.Tensor, weights: dict[str, torch.Tensor], prefix: str, ratio: int, eps: float) -> torch.Tensor:
    """x [T, D] -> normalised latent rows [T // ratio, head_dim], not rotated yet.

    Row g covers tokens g*ratio .. g*ratio + ratio - 1; an open group at the end gives no row. At
    ratio 2 each channel is a softmax-weighted mean of the two tokens; at ratio 1 there is no gate.
    """
    rows = x.shape[0] // ratio
    kv = linear(x, weights[f"{prefix}.wkv.weight"])[: rows * ratio].unflatten(0, (rows, ratio))
    if ratio == 1:
        pooled = kv[:, 0]
    else:
        score = linear(x, weights[f"{prefix}.wgate.weight"])[: rows * ratio].unflatten(0, (rows, ratio))
        pooled = (torch.softmax(score, dim=1) * kv).sum(1)
    return rms_norm(pooled, weights[f"{prefix}.norm.weight"], eps)


def row_positions(rows: int, ratio: int) -> torch.Tensor:
    """A row is rotated at the position of the first token it covers."""
    return torch.arange(rows) * ratio


def visible_rows(tokens: int, ratio: int) -> torch.Tensor:
    """Number of rows that the token at each position sees: groups that are complete, its own included."""
    return (torch.arange(tokens) + 1) // ratio
