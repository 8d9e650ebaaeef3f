"""A tiny llama, for what is about the engine and not about our model."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.harness import GOLDEN

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def write_llama(directory: Path) -> Path:
    """A checkpoint with random weights, wide enough apart that greedy answers do not repeat one token."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "v41-tiny-a" / name, directory)
    drawn = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (512, 128), "lm_head": (512, 128)}
    for layer in range(2):
        projections = {"self_attn.q": (128, 128), "self_attn.k": (64, 128), "self_attn.v": (64, 128)}
        projections |= {"self_attn.o": (128, 128), "mlp.gate": (256, 128), "mlp.up": (256, 128), "mlp.down": (128, 256)}
        shapes |= {f"model.layers.{layer}.{name}_proj": shape for name, shape in projections.items()}
    weights = {f"{name}.weight": torch.randn(shape, generator=drawn) * 0.2 for name, shape in shapes.items()}
    norms = ["model.norm", *(f"model.layers.{i}.{n}_layernorm" for i in range(2) for n in ("input", "post_attention"))]
    save_file(weights | {f"{name}.weight": torch.ones(128) for name in norms}, directory / "model.safetensors")
    return directory
