"""Attention over the window and the chosen compressed rows, all tokens of a batch of texts at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.rope import inverse_frequencies
from deepinfer_vllm.models.deepseek_v41.topology import LayerRole, layer_role
from deepinfer_vllm.training import indexer
from deepinfer_vllm.training.layers import rms_norm, rotate
from deepinfer_vllm.training.parameters import Weights


@dataclass
class Shared:
    """What source layers leave for the layers after them, by the id of the source; B texts of T tokens."""

    rows: dict[int, torch.Tensor] = field(default_factory=dict)  # [B, T // ratio, d], rotated
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # [B, T // ratio, index_head_dim]
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)  # bool [B, T, T // ratio]
    candidates: torch.Tensor | None = None  # bool [B, T, T // ratio]
    index_losses: list[torch.Tensor] = field(default_factory=list)


def angles(positions: torch.Tensor, config: ModelConfig, ratio: int) -> torch.Tensor:
    """[..., rope_dim / 2] radians of positions [...] in layers of that ratio."""
    return positions.unsqueeze(-1) * inverse_frequencies(config.compress_rope if ratio else config.main_rope)


def queries(x: torch.Tensor, weights: Weights, name: str, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] to (q_low [..., rank], query [..., H, d] not rotated)."""
    q_low = rms_norm(x @ weights[f"{name}.wq_a.weight"].T, weights[f"{name}.q_norm.weight"], config.norm_eps)
    return q_low, (q_low @ weights[f"{name}.wq_b.weight"].T).unflatten(-1, (config.num_heads, config.head_dim))


def latent(x: torch.Tensor, weights: Weights, name: str, config: ModelConfig) -> torch.Tensor:
    """x [..., D] to window rows [..., d], not rotated."""
    return rms_norm(x @ weights[f"{name}.wkv.weight"].T, weights[f"{name}.kv_norm.weight"], config.norm_eps)


def attend(query: torch.Tensor, kv: torch.Tensor, allowed: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """query [B, T, H, d], kv [B, N, d], allowed bool [B or 1, T, N], sink [H] to [B, T, H, d].

    The sink is one more row, whose value is zero: a channel more makes its logit the sink for every query.
    """
    wide = torch.cat([query, (sink * query.shape[-1] ** 0.5).expand(query.shape[:-1]).unsqueeze(-1)], dim=-1)
    rows = functional.pad(kv, (0, 1, 0, 1))
    rows[:, -1, -1] = 1
    keys = rows.unsqueeze(1).expand(-1, query.shape[2], -1, -1)
    mask = functional.pad(allowed, (0, 1), value=True).unsqueeze(1)
    scale = query.shape[-1] ** -0.5
    out = functional.scaled_dot_product_attention(wide.transpose(1, 2), keys, keys, attn_mask=mask, scale=scale)
    return out.transpose(1, 2)[..., :-1]


def project_out(out: torch.Tensor, weights: Weights, name: str, config: ModelConfig) -> torch.Tensor:
    """[..., H, d] to [..., D], group by group of heads."""
    grouped = out.flatten(-2).unflatten(-1, (config.o_groups, -1))
    wo_a = weights[f"{name}.wo_a.weight"].unflatten(0, (config.o_groups, -1))
    return torch.einsum("...gi,goi->...go", grouped, wo_a).flatten(-2) @ weights[f"{name}.wo_b.weight"].T


def attention(x: torch.Tensor, layer: int, weights: Weights, config: ModelConfig, shared: Shared) -> torch.Tensor:
    """x [B, T, D] (normalised) to the same. Reads `shared`, and writes to it where `layer` is a source."""
    name, role, tokens = f"layers.{layer}.attn", layer_role(config, layer), x.shape[1]
    positions = torch.arange(tokens)
    turn = angles(positions, config, role.ratio)
    q_low, query = queries(x, weights, name, config)
    query = rotate(query, turn.unsqueeze(-2))
    kv = rotate(latent(x, weights, name, config), turn)
    age = positions.unsqueeze(-1) - positions
    allowed = ((age >= 0) & (age < config.window)).unsqueeze(0)
    if role.ratio:
        _share(x, q_low, query, role, weights, config, shared)
        kv = torch.cat([shared.rows[role.kv_source], kv], dim=1)
        allowed = torch.cat([shared.chosen[role.index_source], allowed.expand(len(x), -1, -1)], dim=-1)
    out = rotate(attend(query, kv, allowed, weights[f"{name}.attn_sink"]), turn.unsqueeze(-2), inverse=True)
    return project_out(out, weights, name, config)


def compress(x: torch.Tensor, weights: Weights, name: str, ratio: int, eps: float) -> torch.Tensor:
    """x [B, T, D] to latent rows [B, T // ratio, d], not rotated."""
    groups = x[:, : x.shape[1] // ratio * ratio].unflatten(1, (-1, ratio))
    kv = groups @ weights[f"{name}.wkv.weight"].T
    if ratio > 1:
        kv = kv * (groups @ weights[f"{name}.wgate.weight"].T).softmax(2)
    return rms_norm(kv.sum(2), weights[f"{name}.norm.weight"], eps)


def _share(
    x: torch.Tensor,
    q_low: torch.Tensor,
    query: torch.Tensor,
    role: LayerRole,
    weights: Weights,
    config: ModelConfig,
    shared: Shared,
) -> None:
    name, ratio, source = f"layers.{role.layer_id}.attn", role.ratio, role.kv_source
    if role.writes_rows:
        rows = compress(x, weights, f"{name}.compressor", ratio, config.norm_eps)
        turn = angles(torch.arange(rows.shape[1]) * ratio, config, ratio)
        shared.rows[source] = rotate(rows, turn)
        shared.keys[source] = indexer.index_keys(rows, weights, f"{name}.indexer", turn, config.norm_eps)
    if role.selects:
        tokens, rows = torch.arange(x.shape[1]), shared.rows[source]
        seen = torch.arange(rows.shape[1]) < (tokens.unsqueeze(-1) + 1) // ratio
        turn, keys = angles(tokens, config, ratio), shared.keys[source]
        scores = indexer.index_scores(x, q_low, keys, seen, weights, f"{name}.indexer", turn, config)
        shared.index_losses.append(indexer.index_loss(query, rows, scores, seen))
        if role.publishes_candidates:
            shared.candidates = indexer.candidate_rows(scores, seen, config)
        elif role.uses_candidates:
            assert shared.candidates is not None
            scores = scores.masked_fill(~shared.candidates, -torch.inf)
        shared.chosen[role.layer_id] = indexer.best(scores, config.index_topk)
