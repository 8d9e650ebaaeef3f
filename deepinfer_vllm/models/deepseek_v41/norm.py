"""Root-mean-square norm: vLLM's, without the dispatch that costs more than the norm of a few tokens on a CPU."""

import torch
from vllm.model_executor.layers import layernorm

from deepinfer_vllm.native import invariance, invariant


class RMSNorm(layernorm.RMSNorm):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension. On a CPU as `forward_native` has it, operation by
    operation; elsewhere vLLM's kernels."""

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """vLLM's hook: x [..., hidden] to the same."""
        if invariance.by_rows():
            wide = invariant.normalise(x, self.variance_epsilon)
            return (wide.to(self.weight.dtype) * self.weight).to(x.dtype)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.variance_epsilon)
        return (wide.to(self.weight.dtype) * self.weight).to(x.dtype)
