"""The vision tower in its published form: `vision_config` and the tensors of tower, aligner and delimiters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_vllm.checkpoint.tensor_spec import TensorSpec

DELIMITERS = ("image_start", "image_newline", "image_end")


@dataclass(frozen=True)
class VisionConfig:
    """Fields of `vision_config`, by their published names; the defaults are a tower for the tiny preset.

    The release takes images from 295936 pixels up and spends at most 1024 tokens on one.
    """

    num_hidden_layers: int = 2
    hidden_size: int = 32
    num_attention_heads: int = 2
    intermediate_size: int = 48
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 128
    min_pixels: int = 7056

    def published(self) -> dict[str, Any]:
        """`vision_config` of config.json."""
        return {"model_type": "deepseek_v41_vision", **asdict(self)}


TEXT_ONLY = {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0}
"""`vision_config` of a checkpoint without a tower."""


def vision_specs(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """All tensors that turn images into embeddings; none for a checkpoint without a tower.

    Standard deviations are chosen so that places of an image are about as large as embedded text, and images differ.
    """
    vision, hidden = config["vision_config"], config["text_config"]["hidden_size"]
    if not vision["num_hidden_layers"]:
        return
    dim, inner, merged = vision["hidden_size"], vision["intermediate_size"], vision["downsample_ratio"] ** 2

    def linear(name: str, outputs: int, inputs: int, gain: float = 1.0, *, bias: bool = True) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{name}.weight", (outputs, inputs), gain * inputs**-0.5)
        if bias:
            yield TensorSpec(f"{name}.bias", (outputs,), 0.2)

    def norm(name: str) -> TensorSpec:
        return TensorSpec(f"{name}.weight", (dim,), 0.25, mean=1.0)

    yield from linear("vision.patch_embed.proj", dim, 3 * vision["patch_size"] ** 2, gain=2.0)
    for layer in range(vision["num_hidden_layers"]):
        prefix = f"vision.blocks.{layer}"
        yield norm(f"{prefix}.norm1")
        yield norm(f"{prefix}.norm2")
        yield from linear(f"{prefix}.attn.wqkv", 3 * dim, dim)
        yield from linear(f"{prefix}.attn.wo", dim, dim)
        yield from linear(f"{prefix}.mlp.w1", 2 * inner, dim, gain=1.4, bias=False)
        yield from linear(f"{prefix}.mlp.w2", dim, inner, bias=False)
    yield norm("vision.norm")
    yield from linear("aligner.w1", hidden, merged * dim, gain=1.5)
    yield from linear("aligner.w2", hidden, hidden, gain=2.0)
    for name in DELIMITERS:
        yield TensorSpec(name, (hidden,), 1.5, is_float32=True)
