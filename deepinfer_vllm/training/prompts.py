"""Beginnings of held-out texts, for benchmarks and calibration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from deepinfer_vllm.checkpoint.tokenizer import build_tokenizer
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.training.architecture import TRAINED
from deepinfer_vllm.training.texts import WORKLOADS, text


def held_out_prompts(
    count: int, *, workloads: Sequence[str] = tuple(WORKLOADS), tokens: int = 64, first: int = 0
) -> list[dict[str, str]]:
    """`count` prompts of about `tokens` tokens, workloads in turn: {"workload": name, "prompt": text}.

    `first` is the number of the first text of each workload: other numbers are other texts. Raises CheckpointError for
    an unknown workload and for a count, `tokens` or `first` out of range.
    """
    unknown = [name for name in workloads if name not in WORKLOADS]
    if unknown or not workloads:
        raise CheckpointError(f"unknown workload {', '.join(unknown) or '(none)'}: choose from {', '.join(WORKLOADS)}")
    for name, value, least in (("count", count, 1), ("tokens", tokens, 1), ("first", first, 0)):
        if value < least:
            raise CheckpointError(f"{name} {value} is too small: give at least {least}")
    tokenizer, prompts = build_tokenizer(TRAINED.vocab_size), []
    for i in range(count):
        workload = workloads[i % len(workloads)]
        ids = tokenizer.encode(text(workload, first + i // len(workloads))).ids
        prompts.append({"workload": workload, "prompt": tokenizer.decode(ids[:tokens])})
    return prompts


def write_prompts(file: Path, prompts: list[dict[str, str]]) -> None:
    """One JSON object a line. Raises OSError when the file cannot be written."""
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
