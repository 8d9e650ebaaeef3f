"""Engram: rows of a hash table, gated into every stream before a layer."""

from __future__ import annotations

import torch

from reference.config import Config
from reference.layers import linear


def engram(
    streams: torch.Tensor,
    rows: torch.Tensor,
    layer: int,
    weights: dict[str, torch.Tensor],
    config: Config,
    is_image: torch.Tensor,
) -> torch.Tensor:
    """streams [T, M, D], rows int [T, columns], is_image [T] -> streams with g_h * value added to stream h.

    g = 0 for image tokens, and otherwise
    g = sigmoid(sign(dot) * sqrt(max(|dot|, 1e-6))), dot being the normalised product of the
    stream (weighted by q) with the key (weighted by k), over sqrt(D).
    """
    prefix, eps, m, d = f"layers.{layer}.engram", config.rms_norm_eps, config.hc_mult, config.hidden_size
    looked_up = weights[f"{prefix}.embed.weight"][rows].flatten(1)
    parts = linear(looked_up, weights[f"{prefix}.wkv.weight"]).unflatten(1, (m + 1, d))
    keys, value = parts[:, :m], parts[:, m:]
    product = streams * weights[f"{prefix}.q_weight"] * weights[f"{prefix}.k_weight"] * keys
    dot = product.sum(-1) * _inverse_rms(streams, eps) * _inverse_rms(keys, eps) * d**-0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    gate[is_image] = 0
    return streams + gate[..., None] * value


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(-1) + eps)
