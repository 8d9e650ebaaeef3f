"""The aligner: squares of neighbouring patches merged into one embedding each."""

import torch
from torch import nn
from vllm.models.deepseek_v4.common.vision import DeepseekV4Aligner


class Aligner(DeepseekV4Aligner):
    """vLLM's parameters. Its own merge hands a transposed view to a linear, which oneDNN's CPU kernel refuses."""

    def forward(self, x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Patches [rows * columns, dim] to [rows / r * columns / r, hidden], both rounded up; what lacks is zero."""
        hidden, _ = self.w1(merge(x.unflatten(0, (rows, columns)), self.downsample_ratio))
        out, _ = self.w2(nn.functional.gelu(hidden))
        return out


def merge(x: torch.Tensor, side: int) -> torch.Tensor:
    """[h, w, dim] to [squares, dim * side * side], squares and patches in reading order, channels outermost."""
    h, w, _ = x.shape
    padded = nn.functional.pad(x, (0, 0, 0, -w % side, 0, -h % side))
    squares = padded.unflatten(1, (-1, side)).unflatten(0, (-1, side))  # [h', side, w', side, dim]
    return squares.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)
