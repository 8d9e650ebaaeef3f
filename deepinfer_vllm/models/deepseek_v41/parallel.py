"""What of the model this process holds, and how the partial results of several processes become whole.

| part | split over | made whole by |
|---|---|---|
| attention heads, their sinks, output groups | tensor-parallel (TP) ranks | a sum in wo_b |
| the shared expert's inner width | TP ranks | one sum with the routed experts' |
| the routed experts' inner width | data-parallel (DP) times TP ranks | tokens gathered over DP, sums returned |
| or whole routed experts (--enable-expert-parallel) | the same ranks | the same |
| embedding and head | TP ranks | vLLM's layers |

All else is held by every rank. DP ranks serve requests of their own, so what they bring to the experts differs in
length, and one without requests still has to take part: the others wait for it.
"""

import functools
from collections.abc import Sequence

import torch
import torch.distributed
from torch import nn
from vllm.distributed import get_dp_group, get_tp_group
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from deepinfer_vllm.models.deepseek_v41.weight_storage import WeightStorage
from deepinfer_vllm.native import invariance


def column_linear(inputs: int, outputs: int, prefix: str, storage: WeightStorage | None = None) -> ColumnParallelLinear:
    """y = x W^T, each TP rank with its part of y."""
    return ColumnParallelLinear(inputs, outputs, bias=False, return_bias=False, quant_config=storage, prefix=prefix)


def row_linear(
    inputs: int, outputs: int, prefix: str, storage: WeightStorage | None = None, *, reduce: bool = True
) -> RowParallelLinear:
    """y = x W^T from each TP rank's part of x. Without `reduce` the result is this rank's share of a sum."""
    kind = SummedInOrder if reduce and _sums_in_order() else RowParallelLinear
    return kind(
        inputs, outputs, bias=False, reduce_results=reduce, return_bias=False, quant_config=storage, prefix=prefix
    )


class SummedInOrder(RowParallelLinear):
    """A row-parallel linear whose partial results are added in rank order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, inputs of this rank] to [T, outputs]."""
        self.reduce_results = False
        return sum_over_tp(super().forward(x))


def row_split(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter as this TP rank's rows of the published tensor."""
    ranks, rank = get_tp_group().world_size, get_tp_group().rank_in_group

    def load(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        parameter.data.copy_(tensor.chunk(ranks)[rank])

    parameter.published_shape = _times(parameter.shape, 0, ranks)
    parameter.weight_loader = load
    return parameter


def published_shape(module: nn.Module, parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the published tensor of which this rank holds a part, or all, as a parameter of `module`."""
    if isinstance(module, ColumnParallelLinear):
        return _times(parameter.shape, 0, module.tp_size)
    if isinstance(module, RowParallelLinear) and parameter.dim() > 1:
        return _times(parameter.shape, 1, module.tp_size)
    return getattr(parameter, "published_shape", tuple(parameter.shape))


def _times(shape: Sequence[int], dim: int, ranks: int) -> tuple[int, ...]:
    return tuple(size * ranks if i == dim else size for i, size in enumerate(shape))


def sum_over_tp(partial: torch.Tensor) -> torch.Tensor:
    """The sum of every TP rank's tensor."""
    group = get_tp_group()
    if _sums_in_order():
        return functools.reduce(torch.add, group.all_gather(partial.unsqueeze(0), dim=0).unbind())
    out: torch.Tensor = group.all_reduce(partial)
    return out


def _sums_in_order() -> bool:
    """Whether an all-reduce could add in an order that moves with an element's place in the batch: not with two ranks,
    where order does not matter."""
    return invariance.decided() and get_tp_group().world_size > 2


def gather_over_dp(tensors: list[torch.Tensor], tokens: list[int]) -> list[torch.Tensor]:
    """Each [tokens of this rank, ...] to [all tokens, ...], in rank order. `tokens`: of every DP rank."""
    out: list[torch.Tensor] = get_dp_group().all_gatherv(tensors, dim=0, sizes=tokens)
    return out


def return_over_dp(partial: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Sum every DP rank's [all tokens, ...], each rank taking its own tokens' rows."""
    out: torch.Tensor = get_dp_group().reduce_scatterv(partial, dim=0, sizes=tokens)
    return out


def tokens_over_dp(count: int) -> list[int]:
    """Every DP rank's token count, where vLLM's metadata do not know it. All ranks must call this together."""
    group = get_dp_group()
    counts = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
    counts[group.rank_in_group] = count
    torch.distributed.all_reduce(counts, group=group.cpu_group)
    out: list[int] = counts.tolist()
    return out
