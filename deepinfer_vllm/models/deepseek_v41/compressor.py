"""The compressor of a KV source: `ratio` tokens pooled into one latent, written beside its index key.

Ratio 1: latent = RMSNorm(x @ wkv). Ratio r: kv and a gate score per channel, float32; the latent is the RMSNorm of kv
averaged over the group's r tokens with softmaxed scores. A group is written when its last token arrives; the tokens of
an open group wait in a cache of their own. Rows are rotated to the position of the group's first token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_vllm.models.deepseek_v41.cache import PagedCache, compressed_spec, window_spec
from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.norm import RMSNorm
from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from deepinfer_vllm.models.deepseek_v41.rope import RotaryTable, rotate
from deepinfer_vllm.models.deepseek_v41.step import Step
from deepinfer_vllm.models.deepseek_v41.windows import Windows
from deepinfer_vllm.native import invariance, invariant
from deepinfer_vllm.native.linear import linear


class Compressor(nn.Module):
    """Owns the compressed rows of one KV group."""

    def __init__(
        self,
        config: ModelConfig,
        ratio: int,
        numerics: Numerics,
        block_size: int,
        dtype: torch.dtype,
        registry: dict[str, Any],
        prefix: str,
        windows: Windows,
    ) -> None:
        super().__init__()
        self.ratio, self.head_dim, self.numerics = ratio, config.head_dim, numerics
        self.norm = RMSNorm(config.head_dim, config.norm_eps)
        if ratio == 1:
            self.wkv = ReplicatedLinear(
                config.hidden_size, config.head_dim, bias=False, return_bias=False, prefix=f"{prefix}.wkv"
            )
        else:
            self.wkv = Float32Linear(config.hidden_size, config.head_dim)
            self.wgate = Float32Linear(config.hidden_size, config.head_dim)
            self.open_group = PagedCache(
                f"{prefix}.open_group",
                window_spec(block_size, 2 * config.head_dim, torch.float32, windows.open_group),
                registry,
            )
        width = config.head_dim + config.index_head_dim
        self.rows = PagedCache(f"{prefix}.rows", compressed_spec(block_size, width, dtype, ratio), registry)

    def forward(
        self,
        x: torch.Tensor,
        step: Step,
        frequencies: torch.Tensor,
        index_key: Callable[[torch.Tensor, RotaryTable], torch.Tensor],
    ) -> None:
        """Write the rows of every group that x [T, hidden] completes. `index_key` maps latents to their keys."""
        if self.ratio == 1:
            group = step.positions
            latent = self.norm(self.wkv(x))
        else:
            request, group, kv = self._pool(x, step)
            if not len(group):  # vLLM's RMSNorm kernel on CUDA fails on no rows, and the next kernel reports it
                return
            latent = self.norm(kv)
        rotary = RotaryTable(group * self.ratio, frequencies)
        values = torch.cat((self.numerics.compressed(rotate(latent, rotary)), index_key(latent, rotary)), dim=-1)
        if self.ratio == 1:
            step.write(self.rows, values)
        else:
            self.rows.write(step.tables[self.rows.name], request, group, values)

    def _pool(self, x: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(request [n], group [n], pooled kv [n, head_dim]) of the groups this step completes, cached ones left out."""
        step.write(self.open_group, torch.cat((self.wkv(x), self.wgate(x)), dim=-1))
        last = (step.positions + 1) % self.ratio == 0
        if step.cached is not None:
            last &= ~step.cached
        request, end = step.request[last], step.positions[last]
        members = end.unsqueeze(-1) - torch.arange(self.ratio - 1, -1, -1, device=end.device)
        table = step.tables[self.open_group.name]
        pooled = pool(self.open_group.read(table, request.unsqueeze(-1), members))
        return request, end // self.ratio, pooled.to(x.dtype)


def pool(members: torch.Tensor) -> torch.Tensor:
    """members [n, ratio, 2 * head_dim] float32, kv then score, to kv [n, head_dim] averaged."""
    if invariance.by_rows():
        return invariant.pool(members)
    kv, score = members.chunk(2, dim=-1)
    return (torch.softmax(score, dim=1) * kv).sum(dim=1)


class Float32Linear(nn.Module):
    """y = x @ weight^T in float32 whatever the model's dtype. Its weight may be stored in less and loses nothing."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.float32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] of any dtype to [..., outputs] float32."""
        return linear(x.float(), self.weight)
