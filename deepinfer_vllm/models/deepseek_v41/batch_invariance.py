"""What keeps a model's answers from depending on the batch outside its layers: the linears that vLLM runs, and forward
passes of one token where the layers cannot compute rows one by one (`native.invariance`)."""

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from deepinfer_vllm.models.deepseek_v41.step import Step
from deepinfer_vllm.native import invariance, invariant

TOWER = ("vision.", "aligner.")
"""One image is one product by itself, whatever the batch; its shape is its own."""


class RowsLinear(UnquantizedLinearMethod):
    """A plain linear of vLLM's, row by row."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """vLLM's hook: the weight stays as it was loaded."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to [..., N]."""
        out = invariant.linear(x, layer.weight)
        return out if bias is None else out + bias


class RowsHead(UnquantizedEmbeddingMethod):
    """The head, row by row."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """vLLM's hook: the weight stays as it was loaded."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, hidden] to [n, vocabulary]."""
        out = invariant.linear(x, layer.weight)
        return out if bias is None else out + bias


def take_over(model: nn.Module) -> None:
    """Have the plain linears and the head of a model computed row by row, where its layers are. Before weights load."""
    if not invariance.by_rows():
        return
    for name, module in model.named_modules():
        if name.startswith(TOWER):
            continue
        if isinstance(module, ParallelLMHead):
            module.quant_method = RowsHead()
        elif isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod:
            module.quant_method = RowsLinear()


def single(step: Step, token: int) -> Step:
    """A step of one token of another, whose shapes follow from the token's position alone."""
    request = int(step.request[token])
    return Step(
        positions=step.positions[token : token + 1],
        request=torch.zeros_like(step.request[:1]),
        spans=[(0, 1)],
        seq_lens=[int(step.positions[token]) + 1],
        tables={name: table[request : request + 1] for name, table in step.tables.items()},
    )
