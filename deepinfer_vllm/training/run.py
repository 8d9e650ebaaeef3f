"""`deepinfer checkpoint train`: from nothing to a checkpoint, its scores and its card."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer_vllm.checkpoint.create import make_room
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.training.architecture import trained_architecture
from deepinfer_vllm.training.evaluate import Scores, evaluate
from deepinfer_vllm.training.shipped import write_pair
from deepinfer_vllm.training.train import Recipe, Report, train


def make_pair(directory: Path, recipe: Recipe, *, force: bool = False, report: Report) -> None:
    """Train and write a bf16 checkpoint and `card.json`.

    Raises CheckpointError for too few steps and a directory that may not be replaced; OSError.
    """
    if min(recipe.target_steps, recipe.draft_steps) < 1:
        raise CheckpointError(f"{recipe.target_steps} and {recipe.draft_steps} steps are too few: give at least 1 each")
    make_room(directory, force)
    start = time.monotonic()
    weights = train(trained_architecture(), recipe, report)
    took = time.monotonic() - start
    weights = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    scores = evaluate(trained_architecture(), weights, rows=recipe.judged)
    for name, of in scores.items():
        report(_line(name, of))
    made = write_pair(directory, weights, force=True)
    card = {
        "recipe": asdict(recipe),
        "sha256": hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(),
        "scores": {name: _row(of) for name, of in scores.items()},
    }
    (directory / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    report(f"{directory}: {made.parameters:,} parameters, {made.size_bytes / 1e6:.1f} MB, in {took:.0f} s")


def _line(name: str, of: Scores) -> str:
    positions = " ".join(f"{share:.2f}" for share in of.greedy)
    return (
        f"{name}: loss {of.loss:.3f}; greedy length {of.greedy_length:.2f} ({positions}); "
        f"at temperature 1 {of.random_length:.2f}, as the confidences say {1 + sum(of.confidence):.2f}"
    )


def _row(of: Scores) -> dict[str, Any]:
    return {
        key: [round(v, 3) for v in value] if isinstance(value, tuple) else round(value, 3)
        for key, value in asdict(of).items()
    }
