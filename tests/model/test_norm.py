"""The norm on a CPU against vLLM's own."""

import pytest
import torch

from deepinfer_vllm.models.deepseek_v41.norm import RMSNorm
from small_model import fill, normal


@pytest.mark.usefixtures("vllm_layers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [1e-20, 1e-2])
def test_as_vllm(dtype: torch.dtype, eps: float) -> None:
    norm = RMSNorm(48, eps, dtype=dtype)
    fill(norm, seed=1)
    for x in (normal(2, 7, 48), normal(3, 5, 3, 48) * 1e-3, torch.zeros(0, 48)):
        got = norm.forward_cpu(x.to(dtype))
        assert got.dtype == dtype and torch.equal(got, norm.forward_native(x.to(dtype)))
