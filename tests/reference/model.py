"""The text model from token ids to logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from reference import mhc
from reference.attention import Shared, attention
from reference.config import Config
from reference.engram import engram
from reference.engram_hash import hash_ids, token_map
from reference.layers import linear, rms_norm
from reference.moe import moe, routed_as_image
from reference.output import Output, as_sets
from reference.weights import read_weights


def load(directory: str | Path) -> Reference:
    """Read `config.json`, the safetensors and (for Engram) `tokenizer.json` of a checkpoint."""
    directory = Path(directory)
    config = Config.read(directory)
    mapping = token_map(directory / "tokenizer.json") if config.engram_layer_ids else []
    return Reference(config, read_weights(directory), mapping)


class Reference:
    def __init__(self, config: Config, weights: dict[str, torch.Tensor], mapping: list[int]) -> None:
        self.config = config
        self.weights = weights
        self.token_map = mapping
        self._cast: dict[torch.dtype, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def forward(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        *,
        qat: bool = False,
        dtype: torch.dtype = torch.float64,
        replay_from: int = 0,
        images: Sequence[torch.Tensor] = (),
    ) -> Output:
        """Compute the whole prompt; `qat` rounds KV rows and index vectors as in training.

        `replay_from`: past the last KV source only tokens from there on have run. Values before it mean nothing.
        `images`: one [places, D] each, which stand where the image tokens do, in their order.
        """
        ids, config = torch.as_tensor(input_ids, dtype=torch.long), self.config
        weights = self._weights_in(dtype)
        hashes = {k: torch.tensor(v) for k, v in hash_ids(ids.tolist(), self.token_map, config).items()}

        is_image = ids == config.image_token_id
        embedded = weights["embed.weight"][ids]
        if images:
            embedded[is_image] = torch.cat(list(images)).to(dtype)
        streams = embedded[:, None].repeat(1, config.hc_mult, 1)
        pre = torch.zeros(len(ids), config.hc_mult, dtype=dtype)
        pre[:, 0] = 1
        shared = Shared(replay_from=replay_from)
        hidden, pre_mix, last, means, router_ids, router_weights = [embedded], [], [], [], [], []
        for layer in range(config.num_hidden_layers):
            means.append(streams.mean(1))
            if layer in hashes:
                streams = engram(streams, hashes[layer], layer, weights, config, is_image)
            mix = self._mixes(streams, layer, "attn", weights)
            x = self._norm(mhc.collapse(streams, pre), f"layers.{layer}.attn_norm", weights)
            streams = mhc.expand(attention(x, layer, weights, config, shared, qat), streams, mix)
            pre = mix.pre

            mix = self._mixes(streams, layer, "ffn", weights)
            x = self._norm(mhc.collapse(streams, pre), f"layers.{layer}.ffn_norm", weights)
            y, experts, expert_weights = moe(x, layer, weights, config, routed_as_image(ids, config))
            streams = mhc.expand(y, streams, mix)
            pre = mix.pre

            hidden.append(mhc.collapse(streams, pre))
            pre_mix.append(pre)
            last.append(streams[-1])
            router_ids.append(experts)
            router_weights.append(expert_weights)
        hidden.append(self._norm(hidden[-1], "norm", weights))
        return Output(
            logits=linear(hidden[-1], weights["head.weight"]),
            hidden_states=torch.stack(hidden),
            pre_mix=torch.stack(pre_mix),
            streams_last=torch.stack(last),
            stream_means=torch.stack(means),
            router_ids=torch.stack(router_ids),
            router_weights=torch.stack(router_weights),
            index_topk={layer: as_sets(chosen) for layer, chosen in shared.chosen.items()},
            candidate_blocks=None if shared.candidate_blocks is None else as_sets(shared.candidate_blocks),
            engram_hash_ids=torch.stack(list(hashes.values())) if hashes else None,
        )

    def greedy(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        count: int,
        *,
        qat: bool = False,
        images: Sequence[torch.Tensor] = (),
    ) -> list[int]:
        """The `count` most likely tokens one after another, each from a fresh pass over everything."""
        ids = torch.as_tensor(input_ids).tolist()
        for _ in range(count):
            ids.append(int(self.forward(ids, qat=qat, images=images).logits[-1].argmax()))
        return ids[-count:] if count else []

    def _mixes(self, streams: torch.Tensor, layer: int, part: str, weights: dict[str, torch.Tensor]) -> mhc.Mixes:
        fn, base, scale = (weights[f"layers.{layer}.hc_{part}_{name}"] for name in ("fn", "base", "scale"))
        return mhc.mixes(streams, fn, base, scale, self.config)

    def _norm(self, x: torch.Tensor, name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return rms_norm(x, weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _weights_in(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if dtype not in self._cast:
            self._cast[dtype] = {name: tensor.to(dtype) for name, tensor in self.weights.items()}
        return self._cast[dtype]
