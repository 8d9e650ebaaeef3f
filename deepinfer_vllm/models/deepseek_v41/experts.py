"""The routed experts. Expert e: w2_e(weight * silu(min(w1_e x, limit)) * clamp(w3_e x, -limit, limit)).

vLLM's fused CPU experts have no clamp (0.32, 0.33), so the experts are plain matrix products here, one pass over the
experts that were chosen, tokens sorted by expert.
"""

import torch
from torch import nn

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.expert_shard import ExpertShard


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) * up in float32, both clamped by `limit` where it is positive."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return nn.functional.silu(gate) * up


class Experts(nn.Module):
    """The routed experts, stacked: w13 [E, 2 * inner, hidden] (gate above up), w2 [E, hidden, inner].

    Of several ranks, each has its `shard` of them; their results add up to that of the whole.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, shard: ExpertShard) -> None:
        super().__init__()
        e, inner, hidden = len(shard.experts), len(shard.inner), config.hidden_size
        self.shard, self.inner, self.limit = shard, inner, config.swiglu_limit
        self.num_experts, self.published_inner = config.num_experts, config.moe_intermediate_size
        self.register_buffer("places", shard.places(config.num_experts), persistent=False)
        self.w13 = nn.Parameter(torch.empty(e, 2 * inner, hidden, dtype=dtype), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(e, hidden, inner, dtype=dtype), requires_grad=False)

    def is_elsewhere(self, expert: int) -> bool:
        """Whether another rank holds this expert."""
        return expert < self.num_experts and expert not in self.shard.experts

    def load(self, expert: int, name: str, weight: torch.Tensor) -> None:
        """Put this rank's part of one expert's w1, w2 or w3 in its place. Raises ValueError for another shape."""
        hidden = self.w2.shape[1]
        published = (hidden, self.published_inner) if name == "w2" else (self.published_inner, hidden)
        if weight.shape != published:  # copy_ would broadcast
            raise ValueError(f"{list(weight.shape)} into {list(published)}")
        place = self.shard.experts.index(expert)
        part = slice(self.shard.inner.start, self.shard.inner.stop)
        if name == "w2":
            self.w2[place].copy_(weight[:, part])
        else:
            self.w13[place].chunk(2)[name == "w3"].copy_(weight[part])

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], experts and weights [T, k] to [T, hidden] float32."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if self.places is not None:
            experts = self.places[experts]
        order = experts.flatten().argsort(stable=True)
        token, weight = order // experts.shape[1], weights.flatten()[order].unsqueeze(-1)
        counts = torch.bincount(experts.flatten(), minlength=self.w2.shape[0]).tolist()
        del counts[self.w2.shape[0] :]  # pairs whose expert is elsewhere are sorted to the end
        start = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                gate, up = nn.functional.linear(x[token[part]], self.w13[expert]).chunk(2, dim=-1)
                inner = (weight[part] * swiglu(gate, up, self.limit)).to(x.dtype)
                out.index_add_(0, token[part], nn.functional.linear(inner, self.w2[expert]).float())
            start += count
        return out
