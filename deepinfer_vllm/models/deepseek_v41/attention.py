"""Attention of one layer: low-rank queries over a sliding window of latents and the selected compressed rows.

K = V = one latent per token or group, rotated; the output is rotated back by the query's position, then projected in
groups. Writing and attending are apart, because a step may write rows for tokens it does not attend for.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_vllm.models.deepseek_v41.cache import PagedCache, window_spec
from deepinfer_vllm.models.deepseek_v41.compressor import Compressor
from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.gather_attention import located_attention, tokens_per_chunk
from deepinfer_vllm.models.deepseek_v41.indexer import Indexer
from deepinfer_vllm.models.deepseek_v41.norm import RMSNorm
from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from deepinfer_vllm.models.deepseek_v41.parallel import column_linear, row_linear, row_split
from deepinfer_vllm.models.deepseek_v41.rope import RotaryTable, inverse_frequencies, rotate
from deepinfer_vllm.models.deepseek_v41.span_attention import Compressed, span_attention
from deepinfer_vllm.models.deepseek_v41.step import Step
from deepinfer_vllm.models.deepseek_v41.topology import LayerRole
from deepinfer_vllm.models.deepseek_v41.weight_storage import WeightStorage, held_weight, packed_or_plain
from deepinfer_vllm.models.deepseek_v41.windows import Windows
from deepinfer_vllm.native import invariance, invariant
from deepinfer_vllm.native.invariant import Rows
from deepinfer_vllm.native.linear import FEW_ROWS, linear
from deepinfer_vllm.triton_kernels.choice import chosen

PLACES = 1 << 20
"""Rows located at once, where attention reads them in place; bounds memory."""

SPAN_TOKENS = 16
"""From so many tokens of one request on, rows are read for all of them at once."""


InPlace: TypeAlias = Callable[[torch.Tensor, Rows, Rows | None, torch.Tensor, float], torch.Tensor]
"""As `located_attention`."""


def _in_place() -> InPlace | None:
    """The kernel that attends over cached rows where they lie, for a layer that is built now; None to gather them."""
    if not chosen():
        return None
    from deepinfer_vllm.triton_kernels import attention

    return attention.attention


class Attention(nn.Module):
    """One layer's attention with this tensor-parallel rank's heads. `sources` maps a layer id to the compressed rows it
    owns, filled as layers are built."""

    def __init__(
        self,
        config: ModelConfig,
        role: LayerRole,
        numerics: Numerics,
        block_size: int,
        dtype: torch.dtype,
        registry: dict[str, Any],
        sources: dict[int, PagedCache],
        prefix: str,
        *,
        windows: Windows,
        rebuilt: bool,
        storage: WeightStorage | None = None,
    ) -> None:
        super().__init__()
        self.role, self.numerics = role, numerics
        ranks = get_tp_group().world_size
        self.heads, self.head_dim = config.num_heads // ranks, config.head_dim
        self.window, self.scale = config.window, config.head_dim**-0.5
        self.skips_rows = rebuilt
        self.in_place = _in_place()

        def linear(inputs: int, outputs: int, name: str) -> nn.Module:
            return ReplicatedLinear(
                inputs, outputs, bias=False, return_bias=False, quant_config=storage, prefix=f"{prefix}.{name}"
            )

        self.wq_a = linear(config.hidden_size, config.q_lora_rank, "wq_a")
        self.q_norm = RMSNorm(config.q_lora_rank, config.norm_eps)
        self.wq_b = column_linear(config.q_lora_rank, config.num_heads * self.head_dim, f"{prefix}.wq_b", storage)
        self.wkv = linear(config.hidden_size, self.head_dim, "wkv")
        self.kv_norm = RMSNorm(self.head_dim, config.norm_eps)
        groups = config.o_groups // ranks
        group_width = self.heads * self.head_dim // groups
        self.wo_a = GroupedLinear(
            groups, group_width, config.o_lora_rank, dtype, storage=storage, prefix=f"{prefix}.wo_a"
        )
        self.wo_b = row_linear(config.o_groups * config.o_lora_rank, config.hidden_size, f"{prefix}.wo_b", storage)
        self.attn_sink = row_split(nn.Parameter(torch.empty(self.heads, dtype=torch.float32), requires_grad=False))

        kept = windows.rebuilt if rebuilt else windows.attention
        self.window_rows = PagedCache(
            f"{prefix}.window", window_spec(block_size, self.head_dim, dtype, kept, rebuilt=rebuilt), registry
        )
        if role.selects:
            self.indexer = Indexer(config, role, numerics, f"{prefix}.indexer", storage)
        if role.writes_rows:
            self.compressor = Compressor(
                config, role.ratio, numerics, block_size, dtype, registry, f"{prefix}.compressor", windows
            )
            sources[role.layer_id] = self.compressor.rows
        self._rows = [sources[role.kv_source]] if role.ratio else []  # a list: another layer's module is not a child
        rope = config.compress_rope if role.ratio else config.main_rope
        self.register_buffer("frequencies", inverse_frequencies(rope), persistent=False)

    def latent(self, x: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
        """The window rows [T, head_dim] of x [T, hidden]; `rotary` of their positions."""
        return self.numerics.window(rotate(self.kv_norm(self.wkv(x)), rotary))

    def _rotary(self, step: Step) -> RotaryTable:
        return step.rotary(self.frequencies, compressed=self.role.ratio > 0)

    def write(self, x: torch.Tensor, step: Step) -> None:
        """Store what later tokens and layers read of x [T, hidden]."""
        step.write(self.window_rows, self.latent(x, self._rotary(step)))
        if self.role.writes_rows:
            self.compressor(x, step, self.frequencies, self.indexer.key)

    def attend(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [T, hidden] to [T, hidden]; everything these tokens may read has been written."""
        rotary = self._rotary(step)
        q_low = self.q_norm(self.wq_a(x))
        query = rotate(self.wq_b(q_low).view(-1, self.heads, self.head_dim), rotary)
        if self.role.selects:
            self.indexer(x, q_low, rotary, self._rows[0], step)
        out = rotate(self._attended(query, step).to(x.dtype), rotary, inverse=True)
        return self.wo_b(self.wo_a(out.flatten(1)))

    def _attended(self, query: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention [T, H, D] float32: long spans one by one, the short ones between them together."""
        out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        if invariance.by_rows() or self.in_place is not None:
            self._located(query, slice(0, step.num_tokens), step, out)
            return out
        done = 0
        for request, (start, end) in enumerate(step.spans):
            if end - start >= SPAN_TOKENS and not step.is_block:
                self._located(query, slice(done, start), step, out)
                out[start:end] = self._span(query[start:end], request, slice(start, end), step)
                done = end
        self._located(query, slice(done, step.num_tokens), step, out)
        return out

    def _located(self, query: torch.Tensor, tokens: slice, step: Step, out: torch.Tensor) -> None:
        """Attention of some tokens into `out`, a chunk of them at a time, each over its own rows in the order of their
        positions."""
        if tokens.start == tokens.stop:
            return
        compressed = step.selected if self.role.ratio else None
        num_rows = step.window_width(self.window) + (0 if compressed is None else compressed.shape[1])
        attention: InPlace = located_attention
        chunk = tokens_per_chunk(num_rows, self.heads, self.head_dim)
        if invariance.by_rows():
            attention, chunk = invariant.attention, max(1, PLACES // num_rows)
        elif self.in_place is not None:
            attention, chunk = self.in_place, max(1, PLACES // num_rows)
        for low in range(tokens.start, tokens.stop, chunk):
            part = slice(low, min(low + chunk, tokens.stop))
            request = step.request[part].unsqueeze(-1)
            index, valid = step.window_rows(self.window, part, floored=self.skips_rows)
            table = step.tables[self.window_rows.name]
            window = self.window_rows.located(table, request, index, valid, self.head_dim)
            chosen = None
            if compressed is not None:
                rows, selected = self._rows[0], compressed[part]
                table = step.tables[rows.name]
                chosen = rows.located(table, request, selected.clamp_min(0), selected >= 0, self.head_dim)
            out[part] = attention(query[part], window, chosen, self.attn_sink, self.scale)

    def _span(self, query: torch.Tensor, request: int, part: slice, step: Step) -> torch.Tensor:
        """Attention of one request's tokens."""
        start = step.first_positions[request]
        low = max(0, start - self.window + 1)
        if step.window_floor is not None and self.skips_rows:
            low = max(low, int(step.window_floor[request]))

        def read(cache: PagedCache, row: torch.Tensor) -> torch.Tensor:
            return cache.read(step.tables[cache.name], torch.full_like(row, request), row, self.head_dim)

        rows = read(self.window_rows, torch.arange(low, start + query.shape[0], device=query.device))
        compressed = None
        if self.role.ratio:
            assert step.selected is not None
            compressed = Compressed(step.selected[part], self.role.ratio, lambda row: read(self._rows[0], row))
        return span_attention(query, start, rows, self.window, compressed, self.attn_sink, self.scale)


class GroupedLinear(nn.Module):
    """Block-diagonal projection: each group of heads by its own matrix. weight [groups * outputs, inputs].

    Where it is held packed, `scale` stands beside it.
    """

    def __init__(
        self,
        groups: int,
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
        *,
        storage: WeightStorage | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.groups, self.storage = groups, storage
        held = dtype if storage is None else storage.held_dtype(f"{prefix}.weight")
        for name, data in packed_or_plain(groups * outputs, inputs, held).items():
            self.register_parameter(name, row_split(nn.Parameter(data, requires_grad=False)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, groups * inputs] to [T, groups * outputs]."""
        if self.storage is not None and self.weight.dtype != x.dtype:
            weight = held_weight(self.weight, self._parameters.get("scale"))
            return self.storage.grouped_linear(x, weight, self.groups)
        parts = x.unflatten(-1, (self.groups, -1)).transpose(0, 1)
        weight = self.weight.unflatten(0, (self.groups, -1))
        if 0 < x.shape[0] <= FEW_ROWS or invariance.by_rows():
            return torch.cat([linear(part, own) for part, own in zip(parts, weight, strict=True)], dim=-1)
        weight = weight.transpose(1, 2)
        return torch.bmm(parts, weight).transpose(0, 1).flatten(1)
