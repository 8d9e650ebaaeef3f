"""Engram: an n-gram memory read from a huge table and gated into the residual streams.

A token's table rows, side by side, are projected to one key per stream and one value. Stream h adds
g_h * value, g_h = sigmoid(sign(d) * sqrt(max(|d|, 1e-6))), d = the normalised, weighted dot product of stream and key;
the sign of 0 is 1.
"""

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_vllm.models.deepseek_v41.config import EngramConfig, ModelConfig
from deepinfer_vllm.models.deepseek_v41.engram_table import EngramTable
from deepinfer_vllm.models.deepseek_v41.weight_storage import WeightStorage
from deepinfer_vllm.native import invariance, invariant

MIN_DOT = 1e-6


class Engram(nn.Module):
    """One layer's memory. `table` is set at load."""

    def __init__(
        self,
        config: ModelConfig,
        engram: EngramConfig,
        dtype: torch.dtype,
        prefix: str,
        storage: WeightStorage | None = None,
    ) -> None:
        super().__init__()
        self.streams, self.hidden, self.eps = config.hc_mult, config.hidden_size, config.norm_eps
        self.wkv = ReplicatedLinear(
            engram.num_columns * engram.head_dim,
            (self.streams + 1) * self.hidden,
            bias=False,
            return_bias=False,
            quant_config=storage,
            prefix=f"{prefix}.wkv",
        )
        self.q_weight = nn.Parameter(torch.empty(self.streams, self.hidden, dtype=dtype), requires_grad=False)
        self.k_weight = nn.Parameter(torch.empty(self.streams, self.hidden, dtype=dtype), requires_grad=False)
        self.table: EngramTable | None = None

    def forward(self, streams: torch.Tensor, rows: torch.Tensor, is_image: torch.Tensor | None = None) -> torch.Tensor:
        """streams [T, M, hidden] with the memory added; rows [T, columns] int64 of the table.

        Where is_image [T] bool holds, nothing is added.
        """
        assert self.table is not None, "the checkpoint has not been loaded"
        memory = self.table.gather(rows).flatten(1).to(streams.device, streams.dtype)
        key, value = self.wkv(memory).float().split((self.streams * self.hidden, self.hidden), dim=-1)
        key = key.unflatten(-1, (self.streams, self.hidden))
        x = streams.float()
        gate = self._gate(x, key)
        if is_image is not None:
            gate = gate.masked_fill(is_image.unsqueeze(-1), 0.0)
        return (x + gate.unsqueeze(-1) * value.unsqueeze(1)).to(streams.dtype)

    def _gate(self, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Gates [T, M] of streams and keys [T, M, hidden], all float32."""
        weight = self.q_weight.float() * self.k_weight.float()
        if invariance.by_rows():
            return invariant.engram_gates(x, weight, key, self.eps, MIN_DOT)
        weighted = (x * weight * key).sum(dim=-1)
        norms = torch.rsqrt(x.square().mean(-1) + self.eps) * torch.rsqrt(key.square().mean(-1) + self.eps)
        dot = weighted * norms * self.hidden**-0.5
        size = dot.abs().clamp_min(MIN_DOT).sqrt()
        return torch.sigmoid(torch.where(dot < 0, -size, size))  # NPUs have no copysign
