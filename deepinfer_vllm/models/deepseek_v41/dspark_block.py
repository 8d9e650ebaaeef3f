"""DSpark's draft layers: they read the target's states as context and predict a whole block of tokens at once.

Context: main_x = norm(proj(the target's mean streams at the entry of a few layers)) of every token that the target has
computed; each draft layer keeps one window row of it, made as its attention makes rows. Block: the last accepted token
and noise after it pass the layers together. A block's token sees the window before the block and all of the block. Its
own rows take the places of tokens to come, and are overwritten by their context rows once those are accepted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from deepinfer_vllm.models.deepseek_v41.attention import Attention
from deepinfer_vllm.models.deepseek_v41.dspark_config import WINDOW_ONLY, DraftConfig
from deepinfer_vllm.models.deepseek_v41.dspark_heads import ConfidenceHead, MarkovHead
from deepinfer_vllm.models.deepseek_v41.layer import DecoderLayer
from deepinfer_vllm.models.deepseek_v41.mhc import begin, collapse
from deepinfer_vllm.models.deepseek_v41.moe import MoE
from deepinfer_vllm.models.deepseek_v41.norm import RMSNorm
from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from deepinfer_vllm.models.deepseek_v41.rope import RotaryTable
from deepinfer_vllm.models.deepseek_v41.step import Step
from deepinfer_vllm.models.deepseek_v41.weight_storage import WeightStorage
from deepinfer_vllm.models.deepseek_v41.windows import Windows


class DraftBlock(nn.Module):
    """The layers and heads under the checkpoint's names. `embed_tokens` is the target's; vLLM's speculator sets it."""

    def __init__(
        self,
        draft: DraftConfig,
        numerics: Numerics,
        block_size: int,
        dtype: torch.dtype,
        registry: dict[str, Any],
        prefix: str,
        *,
        rebuilt: bool,
        storage: WeightStorage | None = None,
    ) -> None:
        super().__init__()
        self.config = config = draft.model
        windows = Windows.plan(config, replay_tokens=0)
        layers = []
        for i in range(draft.num_layers):
            name = f"{prefix}mtp.{i}"
            attention = Attention(
                config,
                WINDOW_ONLY,
                numerics,
                block_size,
                dtype,
                registry,
                {},
                f"{name}.attn",
                windows=windows,
                rebuilt=rebuilt,
                storage=storage,
            )
            layers.append(DecoderLayer(config, attention, None, MoE(config, dtype, f"{name}.ffn", storage)))
        self.mtp = nn.ModuleList(layers)
        # A checkpoint keeps what is there once in the first and the last layer.
        first, last = layers[0], layers[-1]
        first.main_proj = ReplicatedLinear(
            config.hidden_size * len(draft.target_layers),
            config.hidden_size,
            bias=False,
            return_bias=False,
            quant_config=storage,
            prefix=f"{prefix}mtp.0.main_proj",
        )
        first.main_norm = RMSNorm(config.hidden_size, config.norm_eps)
        last.norm = RMSNorm(config.hidden_size, config.norm_eps)
        last.markov_head = MarkovHead(
            config.vocab_size, draft.markov_rank, f"{prefix}mtp.{len(layers) - 1}.markov_head"
        )
        if draft.has_confidence:
            last.confidence_head = ConfidenceHead(config.hidden_size, draft.markov_rank)

    @property
    def confidence_head(self) -> ConfidenceHead | None:
        """vLLM's speculator asks for it."""
        return getattr(self.mtp[-1], "confidence_head", None)

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """main_x [T, D] of the target's states [T, layers * D]."""
        return self.mtp[0].main_norm(self.mtp[0].main_proj(aux))

    def write_context(
        self, main_x: torch.Tensor, positions: torch.Tensor, slots: Sequence[torch.Tensor | None]
    ) -> None:
        """Store the rows of main_x [T, D] at positions [T]; slots, one a layer: [T] int64, negative ones skipped."""
        for layer, at in zip(self.mtp, slots, strict=True):
            if at is not None:
                layer.attn.window_rows.write_slots(
                    at, layer.attn.latent(main_x, RotaryTable(positions, layer.attn.frequencies))
                )

    def forward(self, embeds: torch.Tensor, step: Step) -> torch.Tensor:
        """One block a request: embeds [T, D] to hidden states [T, D] before the final norm."""
        streams, pre = begin(embeds, self.config.hc_mult)
        for layer in self.mtp:
            streams, x = layer.write(streams, pre, step)
            streams, pre = layer.attend(streams, x, step)
        return collapse(streams, pre)
