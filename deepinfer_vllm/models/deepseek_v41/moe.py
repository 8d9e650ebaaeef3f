"""Mixture of experts: each token through its `k` best routed experts and the shared expert.

Selection adds a bias to the scores that the weights do not see ("noaux_tc", DeepSeek-V3 technical report, 2.1.2).
Expert e: w2_e(weight * silu(min(w1_e x, limit)) * clamp(w3_e x, -limit, limit)).

vLLM's fused CPU experts have no clamp (0.32, 0.33), so the experts are plain matrix products here, one pass over the
experts that were chosen, tokens sorted by expert.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_vllm.models.deepseek_v41.compressor import Float32Linear
from deepinfer_vllm.models.deepseek_v41.config import ModelConfig


class Router(Float32Linear):
    """Scores the experts. `bias_vl` steers image tokens and is held for them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.num_experts)
        self.k, self.temperature = config.num_experts_per_token, config.gate_temp
        self.normalise, self.scaling = config.norm_topk_prob, config.routed_scaling_factor
        self.scoring = config.scoring_func
        if config.has_gate_bias:
            self.bias = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32), requires_grad=False)
            self.bias_vl = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32), requires_grad=False)
        else:
            self.bias = None

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] to (experts [T, k] int64, best first; weights [T, k] float32)."""
        scores = self._score(self(x) / self.temperature)
        ranked = scores if self.bias is None else scores + self.bias
        experts = torch.topk(ranked, self.k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.normalise and self.k > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, weights * self.scaling

    def _score(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scoring == "sqrtsoftplus":
            return nn.functional.softplus(logits).sqrt()
        return torch.sigmoid(logits) if self.scoring == "sigmoid" else torch.softmax(logits, dim=-1)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) * up in float32, both clamped by `limit` where it is positive."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return nn.functional.silu(gate) * up


class Experts(nn.Module):
    """The routed experts, stacked: w13 [E, 2 * inner, hidden] (gate above up), w2 [E, hidden, inner]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        e, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.inner, self.limit = inner, config.swiglu_limit
        self.w13 = nn.Parameter(torch.empty(e, 2 * inner, hidden, dtype=dtype), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(e, hidden, inner, dtype=dtype), requires_grad=False)

    def load(self, expert: int, name: str, weight: torch.Tensor) -> None:
        """Put one expert's w1, w2 or w3 in its place. Raises ValueError for a weight of another shape."""
        target = {
            "w1": lambda: self.w13[expert, : self.inner],
            "w3": lambda: self.w13[expert, self.inner :],
            "w2": lambda: self.w2[expert],
        }[name]()
        if weight.shape != target.shape:  # copy_ would broadcast
            raise ValueError(f"{list(weight.shape)} into {list(target.shape)}")
        target.copy_(weight)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], experts and weights [T, k] to [T, hidden] float32."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order = experts.flatten().argsort(stable=True)
        token, weight = order // experts.shape[1], weights.flatten()[order].unsqueeze(-1)
        counts = torch.bincount(experts.flatten(), minlength=self.w2.shape[0]).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                gate, up = nn.functional.linear(x[token[part]], self.w13[expert]).chunk(2, dim=-1)
                inner = (weight[part] * swiglu(gate, up, self.limit)).to(x.dtype)
                out.index_add_(0, token[part], nn.functional.linear(inner, self.w2[expert]).float())
            start += count
        return out


class SharedExpert(nn.Module):
    """The expert every token passes; `n_shared_experts` of them are one wider expert."""

    def __init__(self, config: ModelConfig, prefix: str) -> None:
        super().__init__()
        inner = config.moe_intermediate_size * config.num_shared_experts
        self.limit = config.swiglu_limit

        def linear(inputs: int, outputs: int, name: str) -> nn.Module:
            return ReplicatedLinear(inputs, outputs, bias=False, return_bias=False, prefix=f"{prefix}.{name}")

        self.w1 = linear(config.hidden_size, inner, "w1")
        self.w2 = linear(inner, config.hidden_size, "w2")
        self.w3 = linear(config.hidden_size, inner, "w3")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] to [T, hidden]."""
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class MoE(nn.Module):
    """Router, routed experts and shared expert of one layer."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, prefix: str) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config, dtype)
        if config.num_shared_experts:
            self.shared_experts = SharedExpert(config, f"{prefix}.shared_experts")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] to [T, hidden]."""
        out: Any = self.experts(x, *self.gate.route(x))
        if hasattr(self, "shared_experts"):
            out = out + self.shared_experts(x).float()
        return out.to(x.dtype)
