"""Mixture of experts: sqrt(softplus) scores, selection bias, clamped SwiGLU, one shared expert."""

from __future__ import annotations

import torch

from reference.config import Config
from reference.layers import linear

ROUTED_AS_IMAGE = 5  # the image id and the ids after it


def routed_as_image(ids: torch.Tensor, config: Config) -> torch.Tensor:
    """bool [T]: the tokens that are routed with the image bias."""
    if config.image_token_id < 0:
        return torch.zeros_like(ids, dtype=torch.bool)
    return torch.isin(ids, config.image_token_id + torch.arange(ROUTED_AS_IMAGE))


def route(
    x: torch.Tensor, weights: dict[str, torch.Tensor], prefix: str, config: Config, is_image: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """x [T, D] -> expert ids [T, k] in the order of biased score, and their weights [T, k].

    The bias, of which image tokens [T] have their own, only chooses; the weights come from the scores without it.
    """
    logits = linear(x, weights[f"{prefix}.gate.weight"]) / config.gate_temp
    scores = torch.nn.functional.softplus(logits, threshold=1000).sqrt()
    biased = scores.clone()
    if config.topk_method == "noaux_tc":
        biased[~is_image] += weights[f"{prefix}.gate.bias"]
        biased[is_image] += weights[f"{prefix}.gate.bias_vl"]
    ids = biased.topk(config.num_experts_per_tok, dim=1).indices
    chosen = scores.gather(1, ids)
    if config.norm_topk_prob and config.num_experts_per_tok > 1:  # a lone expert keeps its score, as in the oracle
        chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20)
    return ids, chosen * config.routed_scaling_factor


def expert(x: torch.Tensor, weights: dict[str, torch.Tensor], prefix: str, limit: float) -> torch.Tensor:
    """w2(silu(gate) * up); the gate is clamped from above, up from both sides. A limit of 0 is none."""
    gate, up = linear(x, weights[f"{prefix}.w1.weight"]), linear(x, weights[f"{prefix}.w3.weight"])
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return linear(torch.nn.functional.silu(gate) * up, weights[f"{prefix}.w2.weight"])


def moe(
    x: torch.Tensor, layer: int, weights: dict[str, torch.Tensor], config: Config, is_image: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, D] (normalised), is_image [T] -> output [T, D], expert ids [T, k], expert weights [T, k]."""
    prefix = f"layers.{layer}.ffn"
    ids, mix = route(x, weights, prefix, config, is_image)
    out = torch.zeros_like(x)
    if config.n_shared_experts:
        out += expert(x, weights, f"{prefix}.shared_experts", config.swiglu_limit)
    for number in range(config.n_routed_experts):
        tokens, slots = torch.nonzero(ids == number, as_tuple=True)
        if len(tokens):
            y = expert(x[tokens], weights, f"{prefix}.experts.{number}", config.swiglu_limit)
            out[tokens] += mix[tokens, slots, None] * y
    return out, ids, mix
