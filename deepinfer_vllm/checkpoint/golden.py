"""Read a golden directory: a checkpoint together with the values that another implementation gives for it.

Every count, length and limit comes from `golden.json` and the tensors themselves; no shape is assumed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from deepinfer_vllm.checkpoint.limits import Limits, parse_limits
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError

FORMAT_VERSION = 1
KINDS = {"golden_noqat.safetensors": "plain", "golden.safetensors": "qat", "golden_bf16.safetensors": "bf16"}


@dataclass(frozen=True)
class Prompt:
    """Golden values of one prompt of T tokens; None where the file has none. V vocabulary, L layers, k experts."""

    number: int
    input_ids: torch.Tensor  # int64 [T]
    logits_last8: torch.Tensor | None = None  # [min(T, 8), V]
    argmax: torch.Tensor | None = None  # int32 [T]
    margin: torch.Tensor | None = None  # [T], best minus second logit
    gen_ids: torch.Tensor | None = None  # int64 [G]
    gen_logits: torch.Tensor | None = None  # [G, V], row j chose gen_ids[j]
    forced_logits8: torch.Tensor | None = None  # [8, V], along gen_ids of the float32 file
    hidden_states: torch.Tensor | None = None  # [L + 2, T, D]
    pre_mix: torch.Tensor | None = None  # [L, T, M]
    streams_last: torch.Tensor | None = None  # [L, M, D]
    router_ids: torch.Tensor | None = None  # [L, T, k]
    router_weights: torch.Tensor | None = None  # [L, T, k]
    candidate_blocks: torch.Tensor | None = None  # uint8 [T, blocks]
    engram_hash_ids: torch.Tensor | None = None  # int32 [Engram layers, T, columns]
    index_topk: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> int16 [T, K], -1 is empty

    @property
    def name(self) -> str:
        return f"p{self.number}"


@dataclass(frozen=True)
class Values:
    """One value file. `kind` is plain, qat or bf16."""

    kind: str
    limits: Limits
    prompts: tuple[Prompt, ...]
    constants: dict[str, torch.Tensor]  # engram.* and deq.*


@dataclass(frozen=True)
class Golden:
    directory: Path
    note: str
    prompt_lengths: tuple[int, ...]
    generated_tokens: int
    values: dict[str, Values]  # by kind


def read(directory: str | Path) -> Golden:
    """Read all value files that `golden.json` lists.

    Raises CheckpointError when the directory is not in the format or its parts contradict each other.
    """
    directory = Path(directory)
    about = _about(directory)
    lengths = tuple(int(n) for n in about["prompt_lengths"])
    tensors = {name: _tensors(directory, name) for name in about["files"]}
    inputs = _inputs(directory, lengths, tensors)
    values = {}
    for name, entry in about["files"].items():
        kind = KINDS[name]
        prompts = tuple(_prompt(number, ids, tensors[name]) for number, ids in inputs.items())
        constants = {k: v for k, v in tensors[name].items() if not re.match(r"p\d+\.", k)}
        values[kind] = Values(kind, parse_limits(kind, entry.get("tolerance", {})), prompts, constants)
    return Golden(directory, str(about.get("note", "")), lengths, int(about["generated_tokens"]), values)


def _about(directory: Path) -> dict[str, Any]:
    path = directory / "golden.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: {directory} holds no golden values to compare with")
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if about.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format_version {about.get('format_version')}, can read {FORMAT_VERSION} only")
    if missing := {"prompt_lengths", "generated_tokens", "files"} - about.keys():
        raise CheckpointError(f"{path} lacks {', '.join(sorted(missing))}")
    if strange := set(about["files"]) - KINDS.keys():
        raise CheckpointError(f"{path} lists {', '.join(sorted(strange))}; can read {', '.join(KINDS)} only")
    return about


def _tensors(directory: Path, name: str) -> dict[str, torch.Tensor]:
    path = directory / name
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist, but golden.json lists it")
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return tensors


def _inputs(
    directory: Path, lengths: tuple[int, ...], tensors: dict[str, dict[str, torch.Tensor]]
) -> dict[int, torch.Tensor]:
    """Prompt number -> input ids, from whichever file has them."""
    inputs = {}
    for number, length in enumerate(lengths):
        found = [t[f"p{number}.input_ids"] for t in tensors.values() if f"p{number}.input_ids" in t]
        if not found:
            raise CheckpointError(
                f"{directory}: no file has p{number}.input_ids; golden.json lists {len(lengths)} prompts"
            )
        if len(found[0]) != length:
            raise CheckpointError(f"{directory}: p{number} has {len(found[0])} tokens, golden.json says {length}")
        inputs[number] = found[0].long()
    return inputs


def _prompt(number: int, input_ids: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Prompt:
    own = {f.name for f in fields(Prompt)} - {"number", "input_ids", "index_topk"}
    values = {name: tensors[f"p{number}.{name}"] for name in own if f"p{number}.{name}" in tensors}
    topk = re.compile(rf"p{number}\.index_topk\.(\d+)")
    index_topk = {int(m[1]): tensor for key, tensor in tensors.items() if (m := topk.fullmatch(key))}
    return Prompt(number=number, input_ids=input_ids, index_topk=index_topk, **values)
