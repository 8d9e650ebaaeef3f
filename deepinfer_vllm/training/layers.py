"""The small operations: norm, linear, rotation, hyper-connections. Leading dimensions are free."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.mhc import sinkhorn_in_torch
from deepinfer_vllm.training.parameters import Weights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, angles: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """x [..., d] with its last channels turned in (even, odd) pairs by angles [..., pairs]."""
    pairs = angles.shape[-1]
    plain, tail = x.split((x.shape[-1] - 2 * pairs, 2 * pairs), dim=-1)
    even, odd = tail.unflatten(-1, (pairs, 2)).unbind(-1)
    cos, sin = angles.cos(), -angles.sin() if inverse else angles.sin()
    return torch.cat([plain, torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)], dim=-1)


class Mixes(NamedTuple):
    """pre [..., M] collapses the streams for the next sublayer; post [..., M] and comb [..., M, M] expand."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def mixes(streams: torch.Tensor, weights: Weights, name: str, config: ModelConfig) -> Mixes:
    """The mixes of one sublayer, `layers.0.hc_attn` for example, from the streams [..., M, D] before it."""
    m, flat = config.hc_mult, streams.flatten(-2)
    sizes = (m, m, m * m)
    raw = flat @ weights[f"{name}_fn"].T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.norm_eps)
    parts = zip(raw.split(sizes, -1), weights[f"{name}_scale"], weights[f"{name}_base"].split(sizes), strict=True)
    pre, post, comb = (part * scale + base for part, scale, base in parts)
    comb = sinkhorn_in_torch(comb.unflatten(-1, (m, m)), config.hc_sinkhorn_iters, config.hc_eps)
    return Mixes(torch.sigmoid(pre) + config.hc_eps, 2 * torch.sigmoid(post), comb)


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """[..., M, D] and [..., M] -> [..., D]."""
    return (pre.unsqueeze(-1) * streams).sum(-2)


def expand(y: torch.Tensor, streams: torch.Tensor, mix: Mixes) -> torch.Tensor:
    """New stream j = post_j * y + sum over i of comb[i, j] * stream_i."""
    out = mix.post.unsqueeze(-1) * y.unsqueeze(-2)
    for row, stream in zip(mix.comb.unbind(-2), streams.unbind(-2), strict=True):  # faster than products of 4 x 4
        out = out + row.unsqueeze(-1) * stream.unsqueeze(-2)
    return out


def begin(embeds: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams [..., M, D], each the embedding [..., D], and the `pre` [..., M] that takes the first."""
    pre = torch.zeros(*embeds.shape[:-1], config.hc_mult, dtype=embeds.dtype)
    pre[..., 0] = 1
    return embeds.unsqueeze(-2).expand(*pre.shape, -1), pre


def sublayer(
    streams: torch.Tensor,
    pre: torch.Tensor,
    weights: Weights,
    name: str,
    part: str,
    config: ModelConfig,
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams and `pre` after one part (attn or ffn) of a layer: compute maps its normalised input to its output."""
    mix = mixes(streams, weights, f"{name}.hc_{part}", config)
    x = rms_norm(collapse(streams, pre), weights[f"{name}.{part}_norm.weight"], config.norm_eps)
    return expand(compute(x), streams, mix), mix.pre
