"""x @ weight^T for the few rows of a decode step, at the speed at which memory gives the weight."""

import torch

from deepinfer_vllm.native import invariance, invariant
from deepinfer_vllm.native.build import kernels

FEW_ROWS = 4
"""Up to so many, reading the weight takes longer than multiplying by it; products made for many rows read it slowly."""


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, inputs], weight [outputs, inputs] to [T, outputs]: `torch.nn.functional.linear`, compiled where T is small,
    both are float32 on a CPU and a compiler is there. Does not track gradients."""
    if invariance.by_rows():
        return invariant.linear(x, weight)
    library = kernels() if _fits(x, weight) else None
    if library is None:
        return torch.nn.functional.linear(x, weight)
    x, (outputs, inputs) = x.contiguous(), weight.shape
    out = x.new_empty(x.shape[0], outputs)
    library.few_rows(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], outputs, inputs)
    return out


def is_compiled(dtype: torch.dtype) -> bool:
    """Whether products of few rows with weights of this dtype on vLLM's device are."""
    from vllm.platforms import current_platform

    return dtype == torch.float32 and bool(current_platform.is_cpu()) and kernels() is not None


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    small = x.is_cpu and x.dim() == 2 and 0 < x.shape[0] <= FEW_ROWS
    fit = x.dtype == weight.dtype == torch.float32 and x.shape[-1] == weight.shape[-1] and weight.is_contiguous()
    return bool(small and fit)
