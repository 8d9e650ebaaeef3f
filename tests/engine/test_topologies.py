"""Topologies unlike the released one, through the engine: in chunks, from the prefix cache, preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_vllm.checkpoint.config import TextConfig
from deepinfer_vllm.checkpoint.writer import write_checkpoint
from engine.harness import Engine, poison, preempt_all_every
from reference import load

SIZES: dict[str, Any] = {
    "vocab_size": 397,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "max_position_embeddings": 512,
    "rope_original_positions": 64,
    "sliding_window": 16,
    "index_topk": 8,
    "candidate_source_layer_id": -1,
    "candidate_topk_blocks": 0,
    "candidate_block_size": 0,
    "engram_layer_ids": (),
    "engram_vocab_size": 40,
    "engram_head_dim": 16,
}


def sharing(ratios: tuple[int, ...], kv: tuple[int, ...], index: tuple[int, ...]) -> dict[str, Any]:
    """The fields that say which layers compress and which of them feed the others."""
    return {
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios,
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": index,
    }


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "2-grams beside pairs": {
        **sharing((2, 2, 2, 2), (0, 2), (0, 2, 3)),
        "engram_layer_ids": (3,),
        "engram_max_ngram_size": 2,
    },
    "a window as long as the n-grams": {
        **sharing((0, 2, 1, 1), (1, 2), (1, 2, 3)),
        "engram_layer_ids": (1,),
        "sliding_window": 4,
    },
    "one layer": {**sharing((2,), (0,), (0,)), "engram_layer_ids": (0,)},
    "a window across blocks": {
        **sharing((0, 2, 2, 1, 1, 1), (1, 3), (1, 3, 5)),
        "head_dim": 96,
        "sliding_window": 48,
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
    },
    "5-grams in three layers": {
        **sharing((1, 1, 1, 1), (0,), (0, 2)),
        "engram_layer_ids": (0, 1, 3),
        "engram_max_ngram_size": 5,
        "hc_mult": 1,
    },
    "no YaRN": {**sharing((0, 2, 1, 1), (1, 2), (1, 2)), "rope_factor": 1},
}
LENGTHS = (1, 33, 100)
COUNT, BLOCK = 6, 16


@pytest.mark.parametrize(
    ("name", "replay"),
    [
        *((name, False) for name in TOPOLOGIES),
        ("2-grams beside pairs", True),
        ("a window as long as the n-grams", True),
    ],
)
def test_as_the_reference(engine: Engine, tmp_path: Path, name: str, replay: bool) -> None:
    write_checkpoint(tmp_path, TextConfig(**{**SIZES, **TOPOLOGIES[name]}).published("float32"), seed=1)
    reference, window = load(tmp_path), {**SIZES, **TOPOLOGIES[name]}["sliding_window"]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(397, (length,), generator=generator).tolist() for length in LENGTHS]

    def check(answers: list[Any]) -> None:
        for prompt, answer in zip(prompts, answers, strict=True):
            kept_from = max(0, len(prompt) - window) if replay else 0
            want = reference.forward(prompt + answer.ids[:-1], replay_from=kept_from).logits[len(prompt) - 1 :]
            assert (answer.logits - want).abs().max() <= 2e-4
            assert answer.ids == want.argmax(-1).tolist()

    # Replay depends on cuts, so there prompts stay whole.
    with engine(tmp_path, replay=replay, block_size=BLOCK, max_num_batched_tokens=2048 if replay else 50) as backend:
        poison(backend)
        check(backend.generate_many(prompts, COUNT))
        check(backend.generate_many(prompts, COUNT))
        hit = backend.cached_tokens(prompts[-1])
        assert hit == (LENGTHS[-1] - 1) // BLOCK * BLOCK
        if not replay:
            preempt_all_every(backend, 4)
            check(backend.generate_many(prompts, COUNT))
