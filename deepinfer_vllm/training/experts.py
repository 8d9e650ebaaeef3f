"""The experts of a layer. Which ones take a token has no gradient; with what weight has."""

from __future__ import annotations

import torch
from torch.nn import functional

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.training.parameters import Weights


def swiglu(x: torch.Tensor, weights: Weights, name: str, limit: float) -> torch.Tensor:
    """One expert: x [n, D] to the same."""
    gate, up = x @ weights[f"{name}.w1.weight"].T, x @ weights[f"{name}.w3.weight"].T
    return (functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)) @ weights[f"{name}.w2.weight"].T


def moe(
    x: torch.Tensor, weights: Weights, name: str, config: ModelConfig, loads: dict[str, torch.Tensor]
) -> torch.Tensor:
    """x [..., D] (normalised) to the same. `loads[name]` becomes the tokens [experts] that each has got."""
    flat = x.flatten(0, -2)
    scores = functional.softplus(flat @ weights[f"{name}.gate.weight"].T).sqrt()
    chosen = (scores + weights[f"{name}.gate.bias"]).topk(config.num_experts_per_token, dim=-1).indices
    share = scores.gather(-1, chosen)
    share = share / (share.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    out = swiglu(flat, weights, f"{name}.shared_experts", config.swiglu_limit)
    counts = []
    for expert in range(config.num_experts):
        token, slot = torch.nonzero(chosen == expert, as_tuple=True)
        counts.append(len(token))
        y = swiglu(flat[token], weights, f"{name}.experts.{expert}", config.swiglu_limit)
        out = out.index_add(0, token, share[token, slot].unsqueeze(-1) * y)
    loads[name] = torch.tensor(counts)
    return out.view_as(x)


def balance(weights: Weights, loads: dict[str, torch.Tensor], step: float) -> None:
    """Raise the bias of experts with fewer tokens than the mean, lower the others (DeepSeek-V3 report, 2.1.2)."""
    for name, counts in loads.items():
        weights[f"{name}.gate.bias"].data += step * torch.sign(counts.float().mean() - counts)
