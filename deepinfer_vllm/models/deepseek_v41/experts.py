"""The routed experts. Expert e: w2_e(weight * silu(min(w1_e x, limit)) * clamp(w3_e x, -limit, limit)).

vLLM's fused CPU experts have no clamp (0.32, 0.33), so the experts are plain matrix products here, one pass over the
experts that were chosen, tokens sorted by expert.
"""

from collections.abc import Iterator

import torch
from torch import nn

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.expert_shard import ExpertShard
from deepinfer_vllm.models.deepseek_v41.quantised_matrix import QuantisedMatrix
from deepinfer_vllm.models.deepseek_v41.weight_storage import (
    WeightStorage,
    columns_of,
    held_weight,
    packed_or_plain,
    put,
    rows_of,
)
from deepinfer_vllm.native import invariance, invariant
from deepinfer_vllm.native.linear import linear

RUN_PAIRS = 128
"""(token, expert) pairs that share one activation: all of a decode step's, and of a prefill no more rows than a cache
holds."""


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) * up in float32, both clamped by `limit` where it is positive."""
    if invariance.by_rows():
        return invariant.swiglu(gate, up, limit)
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return nn.functional.silu(gate) * up


class Experts(nn.Module):
    """The routed experts, stacked: w13 [E, 2 * inner, hidden] (gate above up), w2 [E, hidden, inner].

    Where they are held packed, `w13_scale` and `w2_scale` stand beside them. Of several ranks, each has its `shard` of
    them; their results add up to that of the whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        shard: ExpertShard,
        *,
        storage: WeightStorage | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        e, inner, hidden = len(shard.experts), len(shard.inner), config.hidden_size
        self.shard, self.inner, self.limit, self.storage = shard, inner, config.swiglu_limit, storage
        self.num_experts, self.published_inner = config.num_experts, config.moe_intermediate_size
        places = None if shard.slots is not None else shard.places(config.num_experts)
        self.register_buffer("places", places, persistent=False)
        part = None if inner == self.published_inner else shard.inner
        for name, first, rows, columns, cut in (
            ("w13", "w1", 2 * inner, hidden, None),
            ("w2", "w2", hidden, inner, part),
        ):
            held = dtype if storage is None else storage.held_dtype(f"{prefix}.0.{first}.weight", cut)
            for kind, data in packed_or_plain(rows, columns, held, e).items():
                parameter = nn.Parameter(data, requires_grad=False)
                self.register_parameter(name if kind == "weight" else f"{name}_scale", parameter)

    def is_elsewhere(self, expert: int) -> bool:
        """Whether another rank holds this expert."""
        return expert < self.num_experts and expert not in self.shard.experts

    def held(self, name: str, place: int) -> torch.Tensor | QuantisedMatrix:
        """w13 [2 * inner, hidden] or w2 [hidden, inner] of the expert at `place`, as held; nothing is copied."""
        scale = self._parameters.get(f"{name}_scale")
        return held_weight(self._parameters[name][place], None if scale is None else scale[place])

    def load(self, expert: int, name: str, weight: torch.Tensor | QuantisedMatrix) -> None:
        """Put this rank's part of one expert's w1, w2 or w3 in its place. Raises ValueError for what does not fit."""
        hidden = self.w2.shape[1]
        published = (hidden, self.published_inner) if name == "w2" else (self.published_inner, hidden)
        if weight.shape != published:  # copy_ would broadcast
            raise ValueError(f"{list(weight.shape)} into {list(published)}")
        part = slice(self.shard.inner.start, self.shard.inner.stop)
        half = slice(0, self.inner) if name == "w1" else slice(self.inner, 2 * self.inner)
        for place in self.shard.places_of(expert):
            if name == "w2":
                put(weight, self.held("w2", place), lambda w: columns_of(w, part))
            else:
                put(weight, rows_of(self.held("w13", place), half), lambda w: rows_of(w, part))

    def _linear(self, x: torch.Tensor, name: str, place: int) -> torch.Tensor:
        weight = self.held(name, place)
        return linear(x, weight) if self.storage is None else self.storage.linear(x, weight)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], experts and weights [T, k] to [T, hidden] float32. Where EPLB moves experts, slots of all
        ranks stand in the place of experts."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if self.places is not None:
            experts = self.places[experts]
        elif self.shard.slots is not None:
            experts = self.shard.place_of(experts)
        order = experts.flatten().argsort(stable=True)
        token, weight = order // experts.shape[1], weights.flatten()[order].unsqueeze(-1)
        counts = torch.bincount(experts.flatten(), minlength=self.w2.shape[0]).tolist()
        del counts[self.w2.shape[0] :]  # pairs whose expert is elsewhere are sorted to the end
        start = 0
        for run in runs(counts):
            sizes = [counts[expert] for expert in run]
            part = slice(start, start + sum(sizes))
            gate, up = self._each(x[token[part]], "w13", run, sizes).chunk(2, dim=-1)
            inner = (weight[part] * swiglu(gate, up, self.limit)).to(x.dtype)
            out.index_add_(0, token[part], self._each(inner, "w2", run, sizes).float())
            start = part.stop
        return out

    def _each(self, x: torch.Tensor, name: str, run: list[int], sizes: list[int]) -> torch.Tensor:
        """x [n, inputs], of which each expert of a run has its number of rows, times its w13 or w2: [n, outputs]."""
        parts = [self._linear(rows, name, expert) for rows, expert in zip(x.split(sizes), run, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def runs(counts: list[int]) -> Iterator[list[int]]:
    """The experts that have tokens, in order, together while they have at most RUN_PAIRS."""
    run, size = list[int](), 0
    for expert, count in enumerate(counts):
        if run and size + count > RUN_PAIRS:
            yield run
            run, size = [], 0
        if count:
            run.append(expert)
            size += count
    if run:
        yield run
