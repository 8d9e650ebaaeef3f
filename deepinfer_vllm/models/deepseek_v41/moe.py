"""Mixture of experts: each token through its `k` best routed experts and the shared expert."""

import torch
from torch import nn
from vllm.distributed import get_dp_group

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.expert_shard import ExpertShard
from deepinfer_vllm.models.deepseek_v41.expert_slots import ExpertSlots
from deepinfer_vllm.models.deepseek_v41.experts import Experts, swiglu
from deepinfer_vllm.models.deepseek_v41.parallel import (
    column_linear,
    gather_over_dp,
    return_over_dp,
    row_linear,
    sum_over_tp,
)
from deepinfer_vllm.models.deepseek_v41.router import Router
from deepinfer_vllm.models.deepseek_v41.weight_storage import WeightStorage


class SharedExpert(nn.Module):
    """The expert every token passes; `n_shared_experts` of them are one wider expert."""

    def __init__(self, config: ModelConfig, prefix: str, storage: WeightStorage | None = None) -> None:
        super().__init__()
        inner = config.moe_intermediate_size * config.num_shared_experts
        self.limit = config.swiglu_limit

        self.w1 = column_linear(config.hidden_size, inner, f"{prefix}.w1", storage)
        self.w2 = row_linear(inner, config.hidden_size, f"{prefix}.w2", storage, reduce=False)
        self.w3 = column_linear(config.hidden_size, inner, f"{prefix}.w3", storage)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] to this tensor-parallel rank's share of [T, hidden]."""
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class MoE(nn.Module):
    """Router, routed experts and shared expert of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        prefix: str,
        storage: WeightStorage | None = None,
        *,
        balanced: bool = False,
    ) -> None:
        """`balanced`: EPLB may move the experts, if it is enabled; those of draft layers, another number, stay."""
        super().__init__()
        self.dp_ranks = get_dp_group().world_size
        self.gate = Router(config)
        shard = ExpertShard.here(config, balanced=balanced)
        self.experts = Experts(config, dtype, shard, storage=storage, prefix=f"{prefix}.experts")
        self.slots = None if shard.slots is None else ExpertSlots(self.experts)
        if config.num_shared_experts:
            self.shared_experts = SharedExpert(config, f"{prefix}.shared_experts", storage)

    def forward(
        self, x: torch.Tensor, is_image: torch.Tensor | None = None, dp_tokens: list[int] | None = None
    ) -> torch.Tensor:
        """x [T, hidden], is_image [T] bool (None: no token is) to [T, hidden].

        `dp_tokens`: T of every data-parallel rank, where there are several.
        """
        experts, weights = self.gate.route(x, is_image)
        routed = self._routed(x, experts if self.slots is None else self.slots(experts), weights, dp_tokens)
        if hasattr(self, "shared_experts"):
            routed = routed + self.shared_experts(x).float()
        return sum_over_tp(routed).to(x.dtype)

    def _routed(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, dp_tokens: list[int] | None
    ) -> torch.Tensor:
        """The routed experts' [T, hidden] float32; of a tensor-parallel rank, its share."""
        if dp_tokens is None:
            assert self.dp_ranks == 1, "data-parallel ranks share experts: each must know all their token counts"
            out: torch.Tensor = self.experts(x, experts, weights)
            return out
        every = gather_over_dp([x, experts, weights], dp_tokens)
        return return_over_dp(self.experts(*every), dp_tokens)
