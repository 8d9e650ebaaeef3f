"""One decoder layer: Engram where it has one, attention and experts, each between hyper-connections."""

import torch
from torch import nn

from deepinfer_vllm.models.deepseek_v41.attention import Attention
from deepinfer_vllm.models.deepseek_v41.config import ModelConfig
from deepinfer_vllm.models.deepseek_v41.engram import Engram
from deepinfer_vllm.models.deepseek_v41.mhc import HyperConnection, collapse, expand
from deepinfer_vllm.models.deepseek_v41.moe import MoE
from deepinfer_vllm.models.deepseek_v41.norm import RMSNorm
from deepinfer_vllm.models.deepseek_v41.step import Step


class DecoderLayer(nn.Module):
    """A layer in two halves, so that a step can write rows for all tokens and go on with some of them."""

    def __init__(self, config: ModelConfig, attention: Attention, engram: Engram | None, moe: MoE) -> None:
        super().__init__()
        self.attn, self.ffn = attention, moe
        if engram is not None:
            self.engram = engram
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)

        def hyper() -> HyperConnection:
            return HyperConnection(
                config.hc_mult, config.hidden_size, config.hc_sinkhorn_iters, config.hc_eps, config.norm_eps
            )

        self.hc_attn, self.hc_ffn = hyper(), hyper()

    def write(self, streams: torch.Tensor, pre: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """(streams [T, M, hidden] after Engram, attention input x [T, hidden]); stores x's rows."""
        if hasattr(self, "engram"):
            streams = self.engram(streams, step.engram_rows[self.attn.role.layer_id], step.is_image)
        x = self.attn_norm(collapse(streams, pre))
        self.attn.write(x, step)
        return streams, x

    def attend(self, streams: torch.Tensor, x: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """(streams, pre) after attention and experts, for tokens whose rows have been written."""
        pre, post, comb = self.hc_attn(streams)
        streams = expand(self.attn.attend(x, step), streams, post, comb)
        x, pre, post, comb = self.hc_ffn.delayed(streams, pre)
        return expand(self.ffn(self.ffn_norm(x), step.routed_as_image, step.dp_tokens), streams, post, comb), pre
