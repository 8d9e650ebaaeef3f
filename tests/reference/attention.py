"""Attention over the sliding window and the chosen compressed rows, with one latent KV head."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from reference import fake_quant, indexer
from reference.compressor import compress, row_positions, visible_rows
from reference.config import Config
from reference.layers import linear, rms_norm
from reference.rope import frequencies, rotate


@dataclass
class Shared:
    """What source layers leave for the layers after them, by the id of the source."""

    rows: dict[int, torch.Tensor] = field(default_factory=dict)  # rotated compressed KV [rows, head_dim]
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # index keys [rows, index_head_dim]
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)  # bool [T, rows]
    candidate_blocks: torch.Tensor | None = None  # bool [T, blocks]
    replay_from: int = 0  # above the last KV source, window rows before this position are not there


def attention(
    x: torch.Tensor, layer: int, weights: dict[str, torch.Tensor], config: Config, shared: Shared, qat: bool
) -> torch.Tensor:
    """x [T, D] (normalised) -> [T, D]. Reads `shared`, and writes to it where `layer` is a source."""
    prefix, eps = f"layers.{layer}.attn", config.rms_norm_eps
    tokens, ratio = x.shape[0], config.ratio(layer)
    positions, freqs = torch.arange(tokens), frequencies(config, ratio)

    q_low = rms_norm(linear(x, weights[f"{prefix}.wq_a.weight"]), weights[f"{prefix}.q_norm.weight"], eps)
    query = linear(q_low, weights[f"{prefix}.wq_b.weight"]).unflatten(1, (config.num_attention_heads, config.head_dim))
    query = rotate(query, positions, freqs)
    window = rms_norm(linear(x, weights[f"{prefix}.wkv.weight"]), weights[f"{prefix}.kv_norm.weight"], eps)
    window = rotate(window, positions, freqs)
    if qat:
        window = fake_quant.window_kv(window)

    age = positions[:, None] - positions[None]
    kv, allowed = window, (age >= 0) & (age < config.sliding_window)
    if layer > max(config.kv_source_layer_ids, default=-1):
        allowed = allowed & (positions >= shared.replay_from)
    if ratio:
        _write_shared(x, q_low, layer, weights, config, shared, qat)
        kv = torch.cat([shared.rows[config.kv_source(layer)], kv])
        allowed = torch.cat([shared.chosen[config.index_source(layer)], allowed], dim=1)

    out = attend(query, kv, allowed, weights[f"{prefix}.attn_sink"])
    out = rotate(out, positions, freqs, inverse=True)
    return project_out(out, weights[f"{prefix}.wo_a.weight"], weights[f"{prefix}.wo_b.weight"], config.o_groups)


def attend(query: torch.Tensor, kv: torch.Tensor, allowed: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """query [T, H, d], kv [N, d] both key and value, allowed [T, N], sink [H] -> [T, H, d].

    The sink is one more logit in the softmax whose value is zero.
    """
    logits = torch.einsum("thd,nd->thn", query, kv) * query.shape[-1] ** -0.5
    logits = logits.masked_fill(~allowed[:, None], -torch.inf)
    with_sink = torch.cat([logits, sink[None, :, None].expand(logits.shape[0], -1, 1)], dim=-1)
    return torch.einsum("thn,nd->thd", torch.softmax(with_sink, dim=-1)[..., :-1], kv)


def project_out(out: torch.Tensor, wo_a: torch.Tensor, wo_b: torch.Tensor, groups: int) -> torch.Tensor:
    """Each group of heads has its own down-projection wo_a; wo_b mixes the groups."""
    grouped = out.flatten(1).unflatten(1, (groups, -1))
    low = torch.einsum("tgi,goi->tgo", grouped, wo_a.unflatten(0, (groups, -1)))
    return linear(low.flatten(1), wo_b)


def _write_shared(
    x: torch.Tensor,
    q_low: torch.Tensor,
    layer: int,
    weights: dict[str, torch.Tensor],
    config: Config,
    shared: Shared,
    qat: bool,
) -> None:
    prefix, eps, ratio = f"layers.{layer}.attn", config.rms_norm_eps, config.ratio(layer)
    freqs = frequencies(config, ratio)
    if layer in config.kv_source_layer_ids:
        latent = compress(x, weights, f"{prefix}.compressor", ratio, eps)
        places = row_positions(latent.shape[0], ratio)
        rows = rotate(latent, places, freqs)
        shared.rows[layer] = fake_quant.compressed_kv(rows) if qat else rows
        shared.keys[layer] = indexer.index_keys(latent, weights, f"{prefix}.indexer", places, freqs, eps, qat)
    if layer in config.index_source_layer_ids:
        visible = visible_rows(x.shape[0], ratio)
        keys = shared.keys[config.kv_source(layer)]
        scores = indexer.index_scores(x, q_low, keys, visible, weights, f"{prefix}.indexer", freqs, config, qat)
        if layer == config.candidate_source_layer_id:
            shared.candidate_blocks = indexer.candidate_blocks(scores, visible, config)
        elif config.is_masked_by_candidates(layer):
            assert shared.candidate_blocks is not None
            scores = indexer.keep_candidates(scores, shared.candidate_blocks, config)
        shared.chosen[layer] = indexer.top_rows(scores, config.index_topk)
