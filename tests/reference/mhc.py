"""Hyper-connections with delayed mixes: `hc_mult` residual streams instead of one.

A sublayer computes its mixes from the streams before it, but collapses the streams with the `pre`
mix of the sublayer before; the first one of all takes stream 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from reference.config import Config


class Mixes(NamedTuple):
    pre: torch.Tensor  # [T, M] weights with which the next sublayer collapses the streams
    post: torch.Tensor  # [T, M] how much of this sublayer's output each stream takes
    comb: torch.Tensor  # [T, M, M] from stream (first) to stream (second)


def mixes(streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, config: Config) -> Mixes:
    """streams [T, M, D]; fn [(2 + M) * M, M * D]; base [(2 + M) * M]; scale [3]."""
    m = config.hc_mult
    flat = streams.flatten(1)
    raw = (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    pre = torch.sigmoid(raw[:, :m] * scale[0] + base[:m]) + config.hc_eps
    post = 2 * torch.sigmoid(raw[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (raw[:, 2 * m :] * scale[2] + base[2 * m :]).unflatten(1, (m, m))
    return Mixes(pre, post, sinkhorn(comb, config.hc_sinkhorn_iters, config.hc_eps))


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Nearly doubly stochastic [T, M, M]: softmax of rows, columns, then (iterations - 1) x (rows, columns)."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """[T, M, D] and [T, M] -> [T, D]."""
    return torch.einsum("tm,tmd->td", pre, streams)


def expand(output: torch.Tensor, streams: torch.Tensor, mix: Mixes) -> torch.Tensor:
    """New stream j = post_j * output + sum over i of comb[i, j] * stream_i."""
    return mix.post[..., None] * output[:, None] + torch.einsum("tij,tid->tjd", mix.comb, streams)
