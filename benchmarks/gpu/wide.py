"""A checkpoint of the release's widths, a few layers deep, in its quantised format: what the others here run.

Weights are random. So that two implementations agree on tokens wherever they agree on logits, rows of the head differ
in size (log-normal): few tokens compete, and they lie far apart.

Example: python benchmarks/gpu/wide.py /tmp/wide --layers 8 --experts 16
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deepinfer_vllm.checkpoint.config import TextConfig
from deepinfer_vllm.checkpoint.presets import with_layers
from deepinfer_vllm.checkpoint.quantise import CONFIG, quantised
from deepinfer_vllm.checkpoint.tensor_spec import TensorSpec
from deepinfer_vllm.checkpoint.tensors import tensor_specs
from deepinfer_vllm.checkpoint.vision import VisionConfig
from deepinfer_vllm.checkpoint.writer import INDEX, write_texts

SHARD_BYTES = 2 << 30
WIDE = TextConfig(
    vocab_size=32768,
    hidden_size=5120,
    moe_intermediate_size=2304,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1280,
    o_lora_rank=1024,
    o_groups=8,
    max_position_embeddings=262144,
    rope_original_positions=65536,
    num_experts_per_tok=6,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=512,
    candidate_topk_blocks=2048,
    engram_vocab_size=16384,
    engram_n_heads=8,
    engram_head_dim=256,
    num_nextn_predict_layers=3,
    dspark_markov_rank=256,
    dspark_n_routed_experts=16,
    dspark_num_experts_per_tok=3,
)


def config_of(layers: int, experts: int) -> dict[str, Any]:
    """The published config of that depth and number of routed experts."""
    return with_layers(replace(WIDE, n_routed_experts=experts), layers).published("bfloat16", VisionConfig()) | {
        "quantization_config": CONFIG
    }


def write(directory: Path, config: dict[str, Any], device: str, seed: int = 0) -> int:
    """Draw, quantise and save all tensors; their bytes."""
    write_texts(directory, config)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = held = 0

    def flush() -> None:
        nonlocal held
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()
        held = 0

    for spec in tensor_specs(config):
        for name, tensor in quantised(spec.name, _values(spec, seed, device)).items():
            shard[name] = tensor.cpu()
            held += tensor.nbytes
            total += tensor.nbytes
        if held > SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index) + "\n")
    return total


def _values(spec: TensorSpec, seed: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()[:7], "big"))
    values = spec.mean + spec.std * torch.randn(spec.shape, generator=generator, device=device)
    if spec.name == "head.weight":
        values *= torch.exp(torch.randn(spec.shape[0], 1, generator=generator, device=device))
    return values.to(torch.float32 if spec.is_float32 else torch.bfloat16)


def main() -> None:
    """Write the checkpoint and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=8, help="default: 8")
    parser.add_argument("--experts", type=int, default=16, help="routed experts of a layer; default: 16")
    parser.add_argument("--device", default="cuda", help="where tensors are drawn and quantised; default: cuda")
    args = parser.parse_args()
    if args.directory.exists() and any(args.directory.iterdir()):
        sys.exit(f"wide.py: {args.directory} is not empty: give another directory")
    start = time.monotonic()
    size = write(args.directory, config_of(args.layers, args.experts), args.device)
    print(f"{args.directory}: {size / 1e9:.1f} GB in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
