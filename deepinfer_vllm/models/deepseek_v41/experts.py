"""The routed experts. Expert e: w2_e(weight * silu(min(w1_e x, limit)) * clamp(w3_e x, -limit, limit)).

vLLM's fused CPU experts have no clamp (0.32, 0.33), so the experts are plain matrix products here, one pass over the
experts that were chosen, tokens sorted by expert.
"""

import torch
from torch import nn

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig


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
