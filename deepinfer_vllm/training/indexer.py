"""The indexer: which compressed rows a token sees. The choice has no gradient, so its scores learn from attention.

As V3.2's sparse attention is trained: the softmax of the scores should be what the heads of the layer, averaged, give
to the rows (DeepSeek-V3.2 report, 2.1). Nothing else learns from that loss.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.training.layers import rms_norm, rotate
from deepinfer_vllm.training.parameters import Weights


def index_keys(latent: torch.Tensor, weights: Weights, name: str, angles: torch.Tensor, eps: float) -> torch.Tensor:
    """Keys [B, rows, index_head_dim] of rows [B, rows, d] before their rotation by angles [rows, pairs]."""
    key = rms_norm(latent.detach() @ weights[f"{name}.wk.weight"].T, weights[f"{name}.k_norm.weight"], eps)
    return rotate(key, angles)


def index_scores(
    x: torch.Tensor,
    q_low: torch.Tensor,
    keys: torch.Tensor,
    seen: torch.Tensor,
    weights: Weights,
    name: str,
    angles: torch.Tensor,
    config: ModelConfig,
) -> torch.Tensor:
    """[B, T, rows] of x [B, T, D] and q_low [B, T, rank]; -inf where seen [T, rows] is not."""
    heads, dim = config.index_heads, config.index_head_dim
    query = (q_low.detach() @ weights[f"{name}.wq_b.weight"].T).unflatten(-1, (heads, dim))
    query = rotate(query, angles.unsqueeze(-2))
    share = x.detach() @ weights[f"{name}.weights_proj.weight"].T * (dim * heads) ** -0.5
    scores = (share.unsqueeze(-1) * torch.relu(query @ keys.transpose(-1, -2).unsqueeze(1))).sum(-2)
    return scores.masked_fill(~seen, -torch.inf)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """bool like scores [..., n]: the `count` largest that are not -inf."""
    picks = scores.topk(min(count, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, picks, True) & (scores > -torch.inf)


def candidate_rows(scores: torch.Tensor, seen: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """bool [B, T, rows]: rows of the best blocks, the newest among them, from which later index sources choose."""
    size, rows = config.candidate_block_size, scores.shape[-1]
    padded = functional.pad(scores, (0, -rows % size), value=-torch.inf)
    blocks = padded.unflatten(-1, (-1, size)).amax(-1)
    newest = (seen.sum(-1) - 1).clamp(min=0) // size
    pinned = functional.one_hot(newest, blocks.shape[-1]).bool() & seen.any(-1, keepdim=True)
    kept = best(blocks.masked_fill(pinned, torch.inf), config.candidate_blocks)
    return kept.repeat_interleave(size, dim=-1)[..., :rows]


def index_loss(query: torch.Tensor, rows: torch.Tensor, scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Mean KL divergence of the scores from the attention of query [B, T, H, d] to rows [B, rows, d]."""
    with torch.no_grad():
        logits = torch.einsum("bthd,bnd->bthn", query, rows) * query.shape[-1] ** -0.5
        wanted = logits.masked_fill(~seen.unsqueeze(-2), -torch.inf).softmax(-1).mean(-2)
    some = seen.any(-1)
    wanted, found = wanted[:, some], scores[:, some].log_softmax(-1).masked_fill(~seen[some], 0.0)
    return (torch.xlogy(wanted, wanted) - wanted * found).sum(-1).mean()
