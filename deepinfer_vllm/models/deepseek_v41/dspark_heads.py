"""DSpark's two small heads, both fed with the rank-r embedding of the token before the one that is drafted."""

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_vllm.models.deepseek_v41.compressor import Float32Linear


class MarkovHead(nn.Module):
    """Logits a token adds for its successor: a [V, V] table of rank r."""

    def __init__(self, vocab_size: int, rank: int, prefix: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, rank)
        self.embed.weight.requires_grad_(False)
        self.head = ReplicatedLinear(rank, vocab_size, bias=False, return_bias=False, prefix=f"{prefix}.head")


class ConfidenceHead(nn.Module):
    """How likely the target accepts a drafted token."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = Float32Linear(hidden_size + rank, 1)

    def forward(self, hidden: torch.Tensor, markov: torch.Tensor) -> torch.Tensor:
        """hidden [n, D] before the final norm, markov [n, r] to probabilities [n] float32."""
        return torch.sigmoid(self.proj(torch.cat((hidden, markov), dim=-1))).squeeze(-1)
