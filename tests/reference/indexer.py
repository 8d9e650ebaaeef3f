"""The indexer: which compressed rows a token attends to."""

from __future__ import annotations

import torch

from reference import fake_quant
from reference.config import Config
from reference.layers import linear, rms_norm
from reference.rope import rotate


def index_keys(
    latent: torch.Tensor,
    weights: dict[str, torch.Tensor],
    prefix: str,
    positions: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
    qat: bool,
) -> torch.Tensor:
    """Keys [rows, index_head_dim] of a KV source, from its latent rows before rotation."""
    key = rms_norm(linear(latent, weights[f"{prefix}.wk.weight"]), weights[f"{prefix}.k_norm.weight"], eps)
    key = rotate(key, positions, freqs)
    return fake_quant.indexer(key) if qat else key


def index_scores(
    x: torch.Tensor,
    q_low: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor,
    weights: dict[str, torch.Tensor],
    prefix: str,
    freqs: torch.Tensor,
    config: Config,
    qat: bool,
) -> torch.Tensor:
    """score[t, g] = sum over heads h of w_h * relu(q_h . k_g), scaled; rows not visible are -inf.

    x [T, D] gives the head weights, q_low [T, q_lora_rank] the queries.
    """
    heads, dim = config.index_n_heads, config.index_head_dim
    query = linear(q_low, weights[f"{prefix}.wq_b.weight"]).unflatten(1, (heads, dim))
    query = rotate(query, torch.arange(x.shape[0]), freqs)
    if qat:
        query = fake_quant.indexer(query)
    head_weight = linear(x, weights[f"{prefix}.weights_proj.weight"]) * dim**-0.5 * heads**-0.5
    scores = torch.einsum("th,thg->tg", head_weight, torch.relu(torch.einsum("thd,gd->thg", query, keys)))
    return scores.masked_fill(torch.arange(keys.shape[0])[None] >= visible[:, None], -torch.inf)


def top_rows(scores: torch.Tensor, count: int) -> torch.Tensor:
    """bool [T, rows]: the `count` best of each token; picks that are -inf do not count."""
    best = scores.topk(min(count, scores.shape[1]), dim=1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
    return chosen & (scores > -torch.inf)


def candidate_blocks(scores: torch.Tensor, visible: torch.Tensor, config: Config) -> torch.Tensor:
    """bool [T, blocks]: the blocks of consecutive rows that later index sources may choose from.

    A block scores as its best row; the block of the newest visible row is always kept.
    """
    size = config.candidate_block_size
    blocks = -(-scores.shape[1] // size)
    padded = torch.nn.functional.pad(scores, (0, blocks * size - scores.shape[1]), value=-torch.inf)
    block_scores = padded.unflatten(1, (blocks, size)).amax(-1)
    tokens = torch.nonzero(visible > 0).flatten()
    block_scores[tokens, (visible[tokens] - 1) // size] = torch.inf
    return top_rows(block_scores, config.candidate_topk_blocks)


def keep_candidates(scores: torch.Tensor, blocks: torch.Tensor, config: Config) -> torch.Tensor:
    """Rows outside the candidate blocks become -inf."""
    allowed = blocks.repeat_interleave(config.candidate_block_size, dim=1)[:, : scores.shape[1]]
    return scores.masked_fill(~allowed, -torch.inf)
