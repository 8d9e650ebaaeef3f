"""Every tensor of a checkpoint as a parameter to be trained, by its published name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from deepinfer_vllm.checkpoint.tensor_spec import TensorSpec
from deepinfer_vllm.checkpoint.tensors import tensor_specs

Weights = dict[str, torch.Tensor]


def initial_parameters(config: dict[str, Any], seed: int) -> Weights:
    """Float32 parameters of a published config, as training starts; those of draft layers are `mtp.*`."""
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: nn.Parameter(_start(spec, generator)) for spec in tensor_specs(config)}


def _start(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Norms are 1; matrices keep the size of what passes them, those that add to the streams half of it.

    Hyper-connections start near plain residuals: streams stay apart, each takes every output, their mean is read.
    """
    name, kind = spec.name, spec.name.rpartition(".")[2]
    noise = torch.randn(spec.shape, generator=generator)
    if "norm" in name.split(".")[-2] or kind in ("q_weight", "k_weight"):
        return torch.ones_like(noise)
    if kind in ("attn_sink", "bias", "bias_vl"):
        return torch.zeros_like(noise)
    if kind.endswith("_scale"):
        return torch.full_like(noise, 0.3)
    if kind.endswith("_base"):
        return _plain_residual(spec.shape[0]) + 0.3 * noise
    if name == "embed.weight" or "engram.embed" in name or "markov_head.embed" in name:
        return 0.5 * noise
    if "markov_head.head" in name or "confidence_head" in name:
        return torch.zeros_like(noise)
    gain = 0.5 if name.endswith(("wo_b.weight", "w2.weight", "head.weight")) else 1.0
    return gain * spec.shape[-1] ** -0.5 * noise


def _plain_residual(size: int) -> torch.Tensor:
    """Biases [(2 + M) * M]: `pre` 1/M each, `post` 1, `comb` nearly the identity."""
    streams = int((size + 1) ** 0.5) - 1
    pre = torch.full((streams,), -math.log(streams - 1))
    return torch.cat([pre, torch.zeros(streams), 4 * torch.eye(streams).flatten()])
