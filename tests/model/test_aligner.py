"""The merge of patches against vLLM's own, which CUDA runs and CPU kernels refuse."""

import pytest
import torch
from torch import nn

from deepinfer_vllm.models.deepseek_v41.aligner import merge
from small_model import normal


@pytest.mark.parametrize("side", [2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 3), (6, 9), (7, 4), (1, 20), (20, 2)])
def test_as_unfold(rows: int, columns: int, side: int) -> None:
    x = normal(1, rows, columns, 5)
    padded = nn.functional.pad(x.permute(2, 0, 1), (0, -columns % side, 0, -rows % side))
    expected = nn.functional.unfold(padded.unsqueeze(0), side, stride=side)[0].T
    got = merge(x, side)
    assert torch.equal(got, expected) and got.is_contiguous()
