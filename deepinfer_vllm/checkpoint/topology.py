"""Random legal configurations: the topologies that a checkpoint may have, not only the released one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from deepinfer_vllm.checkpoint.config import TextConfig
from deepinfer_vllm.checkpoint.vision import VisionConfig


@dataclass(frozen=True)
class Topology:
    """Which layers compress, and which of them feed the others."""

    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidate_source: int  # -1: none


def random_config(seed: int, dtype: str = "float32", vision: VisionConfig | None = None) -> dict[str, Any]:
    """A small published config, complete and legal; the same seed gives the same one."""
    return random_text_config(seed).published(dtype, vision)


def random_text_config(seed: int) -> TextConfig:
    """Sizes and topology drawn independently of each other, within what the model allows.

    Index heads are many, since with few the ReLU gives exact zero scores, whose order is nobody's to say.
    """
    rng = random.Random(seed)
    topology = random_topology(rng)
    layers = len(topology.ratios)
    heads, groups = rng.choice([(2, 1), (4, 2), (4, 4), (6, 3), (8, 4), (8, 2)])
    experts = rng.choice([4, 6, 8])
    has_candidates = topology.candidate_source >= 0
    return TextConfig(
        vocab_size=rng.choice([384, 397, 512, 515, 640]),
        hidden_size=rng.choice([64, 96, 128]),
        moe_intermediate_size=rng.choice([32, 64]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=rng.choice([32, 48, 64]),
        qk_rope_head_dim=rng.choice([8, 16]),
        q_lora_rank=rng.choice([16, 32, 48]),
        o_lora_rank=rng.choice([16, 32]),
        o_groups=groups,
        swiglu_limit=rng.choice([1.5, 2.5, 10.0]),
        rms_norm_eps=rng.choice([1e-20, 1e-6]),
        max_position_embeddings=1024,
        rope_factor=rng.choice([4, 16]),
        rope_original_positions=rng.choice([64, 128]),
        n_routed_experts=experts,
        num_experts_per_tok=rng.randint(1, 3),
        norm_topk_prob=rng.random() < 0.7,
        routed_scaling_factor=rng.choice([1.0, 1.5, 2.5]),
        gate_temp=rng.choice([None, None, 0.5, 2.0]),
        sliding_window=rng.choice([8, 13, 16, 24]),
        compress_ratios=topology.ratios,
        kv_source_layer_ids=topology.kv_sources,
        index_source_layer_ids=topology.index_sources,
        index_n_heads=rng.choice([16, 24]),
        index_head_dim=rng.choice([16, 32, 48]),
        index_topk=rng.choice([4, 8, 16]),
        candidate_source_layer_id=topology.candidate_source,
        candidate_topk_blocks=rng.choice([2, 3, 8, 1000]) if has_candidates else 0,
        candidate_block_size=rng.choice([2, 3, 4]) if has_candidates else 0,
        hc_mult=rng.choice([2, 4]),
        hc_sinkhorn_iters=rng.choice([1, 5, 20]),
        engram_layer_ids=random_engram_layers(rng, layers),
        engram_max_ngram_size=rng.randint(2, 4),
        engram_vocab_size=rng.randint(17, 80),
        engram_n_heads=rng.randint(1, 3),
        engram_head_dim=rng.choice([16, 32]),
        engram_pad_token_id=rng.choice([2, 2, 5]),
        num_nextn_predict_layers=rng.randint(1, 3),
        dspark_block_size=rng.randint(1, 7),
        dspark_markov_rank=rng.choice([8, 16]),
        dspark_n_routed_experts=rng.choice([3, 5]),
        dspark_num_experts_per_tok=rng.randint(1, 3),
        extra={"dspark_target_layer_ids": sorted(rng.sample(range(layers), rng.randint(1, 3)))},
    )


def random_topology(rng: random.Random) -> Topology:
    """Three to nine layers: plain ones, then groups that each begin with a KV source; sometimes no groups at all.

    Rules kept: the latest KV source at or below a compressed layer has that layer's ratio; every KV source is an index
    source; index sources above the candidate source have its ratio, since they choose among its blocks.
    """
    layers = rng.randint(3, 9)
    if rng.random() < 0.1:
        return Topology((0,) * layers, (), (), -1)
    ratios = [0] * rng.randint(0, 2)
    kv_sources: list[int] = []
    index_sources: list[int] = []
    while len(ratios) < layers:
        ratio = rng.choice([1, 2])
        kv_sources.append(len(ratios))
        index_sources.append(len(ratios))
        ratios.append(ratio)
        for layer in range(len(ratios), min(layers, len(ratios) + rng.randint(0, 4))):
            ratios.append(0 if rng.random() < 0.15 else ratio)
            if ratios[layer] and rng.random() < 0.4:
                index_sources.append(layer)
    candidates = [s for s in index_sources if {ratios[t] for t in index_sources if t >= s} == {ratios[s]}]
    chosen = rng.choice(candidates) if rng.random() < 0.7 else -1
    return Topology(tuple(ratios), tuple(kv_sources), tuple(index_sources), chosen)


def random_engram_layers(rng: random.Random, layers: int) -> tuple[int, ...]:
    """None to three layers; the first and the last ones more often than chance would have it."""
    count = rng.randint(0, 3)
    ends = [layer for layer in (0, layers - 1) if rng.random() < 0.3]
    others = rng.sample(range(layers), layers)
    picked: list[int] = []
    for layer in (*ends, *others):
        if layer not in picked and len(picked) < count:
            picked.append(layer)
    return tuple(sorted(picked))
