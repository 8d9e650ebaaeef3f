"""DSpark: the draft layers over the target's states, a block at a time, and their heads.

What a draft layer sees of token p that the target has computed is one row made from main_x[p], a projection of the mean
streams at the entry of the target layers. The block [anchor, noise, noise, ...] follows these tokens; each of its
tokens sees the last window of rows and the whole block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from reference import fake_quant, mhc
from reference.attention import attend, project_out
from reference.config import Config
from reference.layers import linear, rms_norm
from reference.moe import moe
from reference.rope import frequencies, rotate


@dataclass
class Draft:
    """One block of G drafted tokens."""

    tokens: list[int]
    hidden: torch.Tensor  # [G, D], before the final norm
    logits: torch.Tensor  # [G, V], the Markov head's part included
    confidence: torch.Tensor  # [G]


class DraftReference:
    """`weights` and `config` as the text model's reference reads them."""

    def __init__(self, config: Config, weights: dict[str, torch.Tensor]) -> None:
        self.target = config
        self.config = replace(
            config,
            n_routed_experts=config.dspark_n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok,
        )
        self.layers = range(config.num_nextn_predict_layers)
        self.last = f"mtp.{self.layers[-1]}"
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        # Layer functions of the text model look for "layers.N": draft layers under that name.
        self.as_layers = {
            name.replace("mtp.", "layers.", 1): t for name, t in self.weights.items() if name.startswith("mtp.")
        }
        self.freqs = frequencies(config, ratio=0)

    def main_x(self, stream_means: torch.Tensor) -> torch.Tensor:
        """What draft layers read of the target [T, D]; stream_means [L, T, D] of all its layers."""
        states = torch.cat([stream_means[layer] for layer in self.target.dspark_target_layer_ids], dim=-1)
        projected = linear(states.double(), self.weights["mtp.0.main_proj.weight"])
        return self._norm(projected, "mtp.0.main_norm")

    def rows(self, x: torch.Tensor, layer: int, positions: torch.Tensor, qat: bool = False) -> torch.Tensor:
        """Rotated rows [T, head_dim] of x [T, D] in one draft layer."""
        latent = self._norm(linear(x, self.weights[f"mtp.{layer}.attn.wkv.weight"]), f"mtp.{layer}.attn.kv_norm")
        rows = rotate(latent, positions, self.freqs)
        return fake_quant.window_kv(rows) if qat else rows

    @torch.no_grad()
    def block(self, main_x: torch.Tensor, anchor: int, length: int, qat: bool = False) -> torch.Tensor:
        """Hidden states [length, D] of the block after main_x [T, D], before the final norm."""
        before = len(main_x)
        ids = torch.tensor([anchor] + [self.target.dspark_noise_token_id] * (length - 1))
        streams = self.weights["embed.weight"][ids][:, None].repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(length, self.config.hc_mult, dtype=torch.float64)
        pre[:, 0] = 1
        for layer in self.layers:
            mix = self._mixes(streams, layer, "attn")
            x = self._norm(mhc.collapse(streams, pre), f"mtp.{layer}.attn_norm")
            seen = self.rows(main_x, layer, torch.arange(before), qat)[-self.config.sliding_window :]
            own = self.rows(x, layer, torch.arange(before, before + length), qat)
            y = self._attention(x, torch.cat([seen, own]), layer, torch.arange(before, before + length))
            streams, pre = mhc.expand(y, streams, mix), mix.pre
            mix = self._mixes(streams, layer, "ffn")
            x = self._norm(mhc.collapse(streams, pre), f"mtp.{layer}.ffn_norm")
            y, _, _ = moe(x, layer, self.as_layers, self.config, torch.zeros(length, dtype=torch.bool))
            streams, pre = mhc.expand(y, streams, mix), mix.pre
        return mhc.collapse(streams, pre)

    @torch.no_grad()
    def draft(self, main_x: torch.Tensor, anchor: int, length: int, qat: bool = False) -> Draft:
        """Greedy tokens of one block, left to right: each adds its Markov row to the next one's logits."""
        hidden = self.block(main_x, anchor, length, qat)
        base = linear(self._norm(hidden, f"{self.last}.norm"), self.weights["head.weight"])
        markov, head = (self.weights[f"{self.last}.markov_head.{name}.weight"] for name in ("embed", "head"))
        confidence = self.weights[f"{self.last}.confidence_head.proj.weight"][0]
        tokens, logits, scores, previous = [], [], [], anchor
        for k in range(length):
            logits.append(base[k] + head @ markov[previous])
            scores.append(torch.sigmoid(confidence @ torch.cat([hidden[k], markov[previous]])))
            previous = int(logits[-1].argmax())
            tokens.append(previous)
        return Draft(tokens, hidden, torch.stack(logits), torch.stack(scores))

    def _attention(self, x: torch.Tensor, kv: torch.Tensor, layer: int, positions: torch.Tensor) -> torch.Tensor:
        prefix = f"mtp.{layer}.attn"
        q_low = self._norm(linear(x, self.weights[f"{prefix}.wq_a.weight"]), f"{prefix}.q_norm")
        query = linear(q_low, self.weights[f"{prefix}.wq_b.weight"])
        query = rotate(query.unflatten(1, (self.config.num_attention_heads, -1)), positions, self.freqs)
        everything = torch.ones(len(x), len(kv), dtype=torch.bool)
        out = rotate(
            attend(query, kv, everything, self.weights[f"{prefix}.attn_sink"]), positions, self.freqs, inverse=True
        )
        wo_a, wo_b = (self.weights[f"{prefix}.{name}.weight"] for name in ("wo_a", "wo_b"))
        return project_out(out, wo_a, wo_b, self.config.o_groups)

    def _mixes(self, streams: torch.Tensor, layer: int, part: str) -> mhc.Mixes:
        fn, base, scale = (self.weights[f"mtp.{layer}.hc_{part}_{name}"] for name in ("fn", "base", "scale"))
        return mhc.mixes(streams, fn, base, scale, self.config)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)
