"""Engram: rows of a hash table, gated into the streams."""

from __future__ import annotations

from functools import cached_property

import torch

from deepinfer_vllm.checkpoint.tokenizer import build_tokenizer
from deepinfer_vllm.models.deepseek_v41.config import EngramConfig, ModelConfig
from deepinfer_vllm.models.deepseek_v41.engram_hash import compressed_vocabulary, hash_layouts, ngram_rows
from deepinfer_vllm.training.parameters import Weights

MIN_DOT = 1e-6


class Hashes:
    """The table rows that tokens read, by Engram layer."""

    def __init__(self, engram: EngramConfig, vocab_size: int) -> None:
        self.engram, self.vocab_size = engram, vocab_size
        self.layouts = dict(zip(engram.layer_ids, hash_layouts(engram), strict=True))

    @cached_property
    def classes(self) -> torch.Tensor:
        """[vocabulary] compressed ids."""
        return compressed_vocabulary(build_tokenizer(self.vocab_size), self.vocab_size)[0]

    def rows(self, ids: torch.Tensor) -> dict[int, torch.Tensor]:
        """ids [B, T], each row a text from its start, to [B, T, columns] of every Engram layer."""
        back, compressed = self.engram.max_ngram, self.classes[ids]
        pad = int(self.classes[self.engram.pad_token_id])
        padded = torch.nn.functional.pad(compressed, (back - 1, 0))
        history = padded.unfold(-1, back, 1).flip(-1).flatten(0, 1)
        positions = torch.arange(ids.shape[1]).repeat(len(ids))
        return {
            layer: ngram_rows(history, positions, pad, layout).unflatten(0, ids.shape)
            for layer, layout in self.layouts.items()
        }


def engram(streams: torch.Tensor, rows: torch.Tensor, weights: Weights, name: str, config: ModelConfig) -> torch.Tensor:
    """streams [..., M, D] plus what rows [..., columns] say, gated stream by stream."""
    m, d, eps = config.hc_mult, config.hidden_size, config.norm_eps
    memory = weights[f"{name}.embed.weight"][rows].flatten(-2) @ weights[f"{name}.wkv.weight"].T
    key, value = memory.unflatten(-1, (m + 1, d)).split((m, 1), dim=-2)
    dot = (streams * weights[f"{name}.q_weight"] * weights[f"{name}.k_weight"] * key).sum(-1)
    norms = torch.rsqrt(streams.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = dot * norms * d**-0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=MIN_DOT).sqrt())
    return streams + gate.unsqueeze(-1) * value
