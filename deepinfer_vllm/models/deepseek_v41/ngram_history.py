"""The last compressed token ids of every request, in a cache, and the Engram rows they hash to."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from deepinfer_vllm.models.deepseek_v41.cache import PagedCache, window_spec
from deepinfer_vllm.models.deepseek_v41.config import ConfigError, EngramConfig, ModelConfig
from deepinfer_vllm.models.deepseek_v41.engram_hash import DEAD, compressed_vocabulary, hash_layouts, ngram_rows
from deepinfer_vllm.models.deepseek_v41.step import Step
from deepinfer_vllm.models.deepseek_v41.windows import Windows


class NgramHistory(nn.Module):
    """The last compressed token ids of every request, and the table rows they hash to."""

    def __init__(
        self,
        config: ModelConfig,
        engram: EngramConfig,
        directory: Path,
        block_size: int,
        windows: Windows,
        registry: dict[str, Any],
        prefix: str,
    ) -> None:
        super().__init__()
        tokenizer = directory / "tokenizer.json"
        if not tokenizer.is_file():
            raise FileNotFoundError(f"{tokenizer} is missing: Engram hashes depend on it. Copy it from the release")
        token_map, classes = compressed_vocabulary(Tokenizer.from_file(str(tokenizer)), config.vocab_size)
        if classes != engram.compressed_vocab_size:
            limit = f"{tokenizer.name} yields {classes} classes, and every hash depends on that number"
            raise ConfigError(
                "engram_compressed_vocab_size", engram.compressed_vocab_size, limit, "Use the release's own tokenizer"
            )
        self.register_buffer("token_map", token_map, persistent=False)
        self.layouts = hash_layouts(engram)
        self.layer_ids, self.span = engram.layer_ids, engram.max_ngram
        self.pad = int(token_map[engram.pad_token_id])
        self.ids = PagedCache(
            f"{prefix}.{engram.layer_ids[0]}.engram.history",
            window_spec(block_size, 1, torch.int32, windows.history),
            registry,
        )

    def forward(self, ids: torch.Tensor, step: Step) -> dict[int, torch.Tensor]:
        """Store ids [T]; rows [T, columns] by Engram layer. No n-gram spans an image token."""
        compressed = self.token_map[ids]
        if step.is_image is not None:
            compressed = compressed.masked_fill(step.is_image, DEAD)
        step.write(self.ids, compressed.unsqueeze(-1))
        back = (step.positions.unsqueeze(-1) - torch.arange(self.span, device=ids.device)).clamp_min(0)
        history = step.read(self.ids, back).squeeze(-1).long()
        return {
            layer_id: ngram_rows(history, step.positions, self.pad, layout)
            for layer_id, layout in zip(self.layer_ids, self.layouts, strict=True)
        }
