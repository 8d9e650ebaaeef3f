"""Mixture of experts: each token through its `k` best routed experts and the shared expert."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.experts import Experts, swiglu
from deepinfer_vllm.models.deepseek_v41.router import Router


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

    def forward(self, x: torch.Tensor, is_image: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden], is_image [T] bool (None: no token is) to [T, hidden]."""
        out: Any = self.experts(x, *self.gate.route(x, is_image))
        if hasattr(self, "shared_experts"):
            out = out + self.shared_experts(x).float()
        return out.to(x.dtype)
