"""Published tensor names into parameters, every mismatch in one error.

Modules carry the checkpoint's names, so a tensor finds its parameter by name; the exceptions stand here: routed experts
are stacked, hyper-connection parameters are grouped, and Engram tables are not loaded but mapped.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from deepinfer_vllm.models.deepseek_v41.engram_table import open_tables
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.models.deepseek_v41.parallel import published_shape
from deepinfer_vllm.models.deepseek_v41.quantised_matrix import QuantisedMatrix
from deepinfer_vllm.models.deepseek_v41.quantised_stream import joined
from deepinfer_vllm.models.deepseek_v41.weight_storage import check_kind

_EXPERT = re.compile(r"((?:layers|mtp)\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.(?:weight|scale)")
_HYPER = re.compile(r"((?:layers|mtp)\.\d+)\.hc_(attn|ffn)_(fn|base|scale)")
_TABLE = re.compile(r"layers\.\d+\.engram\.embed\.(weight|scale)")
_DRAFT = re.compile(r"mtp\.")
_VISION = re.compile(r"(vision|aligner)\.|image_(start|end|newline)$")


def checkpoint_directory(model: str, revision: str | None) -> Path:
    """The folder of a checkpoint given as a path or, already downloaded, as a hub id."""
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def is_draft(name: str) -> bool:
    """Whether a tensor belongs to the draft layers."""
    return _DRAFT.match(name) is not None


def is_target(name: str, sees: bool) -> bool:
    """Whether a tensor belongs to the target model: no draft layer, and what images need only if it `sees` them."""
    return not is_draft(name) and (sees or not _VISION.match(name))


def load(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy tensors into the target model and map its Engram tables; the names of all parameters filled.

    Raises CheckpointError as `fill` and `open_tables` do.
    """
    sees = hasattr(model, "vision")
    filled = fill(model, ((name, t) for name, t in tensors if is_target(name, sees) and not _TABLE.fullmatch(name)))
    for layer_id, table in open_tables(model.config, model.directory).items():
        model.layers[layer_id].engram.table = table
    return filled


def fill(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy tensors into the parameters of their names, quantised ones widened where those are plain; all their names.

    `model.config` tells the vocabulary. Raises CheckpointError listing every tensor that is unexpected, missing or of
    another shape or kind.
    """
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    vocabulary = (model.config.vocab_size, model.config.hidden_size)  # whose parameters vLLM pads
    missing = expected_names(model)
    unexpected: list[str] = []
    unfit: list[str] = []

    def is_elsewhere(name: str) -> bool:
        """Whether a tensor is of an expert that another rank holds."""
        expert = _EXPERT.fullmatch(name)
        return bool(expert and expert[1] in modules and modules[expert[1]].is_elsewhere(int(expert[2])))

    for name, tensor in joined((name, t) for name, t in tensors if not is_elsewhere(name)):
        if name not in missing:
            unexpected.append(name)
            continue
        missing.discard(name)
        try:
            if isinstance(tensor, str):
                raise ValueError(tensor)
            if match := _EXPERT.fullmatch(name):
                modules[match[1]].load(int(match[2]), match[3], tensor)
            else:
                own_name = _HYPER.sub(r"\1.hc_\2.\3", name)
                module, _, parameter = own_name.rpartition(".")
                shape = vocabulary if name in ("embed.weight", "head.weight") else None
                _fill_parameter(modules[module], parameter, tensor, shape)
        except (RuntimeError, ValueError, AssertionError) as error:
            unfit.append(f"{name} ({error})")
    _report(unexpected, sorted(missing), unfit)
    return set(parameters)


def _fill_parameter(
    module: nn.Module, name: str, tensor: torch.Tensor | QuantisedMatrix, shape: tuple[int, ...] | None
) -> None:
    """Copy a tensor, or the codes and scales of one that is held packed, as the parameters' own loaders do it."""
    parameter, scale = getattr(module, name), module._parameters.get("scale") if name == "weight" else None
    if scale is None:
        tensor = tensor.widen(parameter.dtype) if isinstance(tensor, QuantisedMatrix) else tensor
        _load(parameter, tensor, shape or published_shape(module, parameter))
        return
    check_kind(tensor, parameter.dtype)
    _load(parameter, tensor.codes, published_shape(module, parameter))
    _load(scale, tensor.scale, published_shape(module, scale))


def _load(parameter: nn.Parameter, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:  # loaders and copy_ would broadcast
        raise ValueError(f"{list(tensor.shape)} into {list(shape)}")
    getattr(parameter, "weight_loader", _copy)(parameter, tensor)


def _copy(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor)


def _scale_of(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scale"


def expected_names(model: nn.Module) -> set[str]:
    """Every tensor that is loaded, by its name in a checkpoint; Engram tables are not among them."""
    names: set[str] = set()
    parameters = dict(model.named_parameters())
    scales = {_scale_of(name) for name in parameters if name.endswith(".weight")}
    for name in parameters:
        if name.endswith(("ffn.experts.w13", "ffn.experts.w2")):
            stem, stacked = name.rsplit(".", 1)
            parts = ("w1", "w3") if stacked == "w13" else ("w2",)
            names.update(f"{stem}.{e}.{w}.weight" for e in model.get_submodule(stem).shard.experts for w in parts)
        elif name not in scales and not name.endswith(("w13_scale", "w2_scale")):  # they come with their weights
            names.add(re.sub(r"\.hc_(attn|ffn)\.", r".hc_\1_", name))
    return names


def _report(unexpected: list[str], missing: list[str], unfit: list[str]) -> None:
    problems = [
        f"{len(found)} {what}: {', '.join(found[:40])}{', …' if len(found) > 40 else ''}"
        for what, found in (("unexpected", unexpected), ("missing", missing), ("that do not fit", unfit))
        if found
    ]
    if problems:
        raise CheckpointError(
            f"DeepSeek-V4.1 checkpoint does not fit its config.json: {'; '.join(problems)}. "
            "Check that the config belongs to these files and that no shard is missing"
        )
