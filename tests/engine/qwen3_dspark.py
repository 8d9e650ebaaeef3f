"""A tiny Qwen3 and a DSpark draft model for it, as vLLM has them: for what is not about V4.1."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.harness import GOLDEN
from engine.llama import CONFIG

HIDDEN, VOCABULARY = CONFIG["hidden_size"], CONFIG["vocab_size"]
RANK, LAYERS, DRAFT_LAYERS = 16, 4, 2
TARGET: dict[str, Any] = {
    **CONFIG,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": LAYERS,
}
DRAFT = {
    **TARGET,
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": DRAFT_LAYERS,
    "block_size": 5,
    "markov_rank": RANK,
    "mask_token_id": 3,
    "target_layer_ids": [1, 2],
    "dspark_target_layer_ids": [1, 2],
    "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 3},
    "confidence_head_with_markov": True,
}


def write_pair(directory: Path, *, confidence_head: bool) -> tuple[Path, Path]:
    """Target and draft model, with random weights; the draft's layers see the target's states through `fc`."""
    target, draft = directory / "target", directory / "draft"
    _write(target, TARGET, {f"model.{name}": tensor for name, tensor in _layers(LAYERS).items()} | _ends("model."))
    heads = {
        "fc.weight": _random(HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "markov_head.markov_w1.weight": _random(VOCABULARY, RANK),
        "markov_head.markov_w2.weight": _random(VOCABULARY, RANK),
    }
    if confidence_head:
        heads |= {"confidence_head.proj.weight": _random(1, HIDDEN + RANK), "confidence_head.proj.bias": torch.zeros(1)}
    _write(draft, {**DRAFT, "enable_confidence_head": confidence_head}, _layers(DRAFT_LAYERS) | _ends("") | heads)
    return target, draft


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.1


def _layers(count: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for i in range(count):
        shapes = {"self_attn.q": (128, HIDDEN), "self_attn.k": (64, HIDDEN), "self_attn.v": (64, HIDDEN)}
        shapes |= {"self_attn.o": (HIDDEN, 128), "mlp.gate": (256, HIDDEN), "mlp.up": (256, HIDDEN)}
        shapes |= {"mlp.down": (HIDDEN, 256)}
        tensors |= {f"layers.{i}.{name}_proj.weight": _random(*shape) for name, shape in shapes.items()}
        tensors |= {f"layers.{i}.self_attn.{n}_norm.weight": torch.ones(32) for n in "qk"}
        tensors |= {f"layers.{i}.{n}_layernorm.weight": torch.ones(HIDDEN) for n in ("input", "post_attention")}
    return tensors


def _ends(prefix: str) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}embed_tokens.weight": _random(VOCABULARY, HIDDEN),
        f"{prefix}norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _random(VOCABULARY, HIDDEN) * 5,
    }


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "v41-tiny-a" / name, directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
