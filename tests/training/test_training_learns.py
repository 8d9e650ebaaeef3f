"""Training: losses by hand, what has gradients, and a short run that learns."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.training.architecture import trained_architecture
from deepinfer_vllm.training.batches import training_batch
from deepinfer_vllm.training.draft import Draft
from deepinfer_vllm.training.experts import balance
from deepinfer_vllm.training.losses import draft_loss
from deepinfer_vllm.training.optimiser import schedule
from deepinfer_vllm.training.parameters import initial_parameters
from deepinfer_vllm.training.run import make_pair
from deepinfer_vllm.training.target import Target
from deepinfer_vllm.training.texts import WORKLOADS
from deepinfer_vllm.training.train import Recipe, block_losses, is_draft

SHORT = Recipe(length=64, rows=2, target_steps=30, draft_steps=10, anchors=8, judged=1)


def test_losses_by_hand() -> None:
    drafted = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]).log()
    target = torch.tensor([[[0.5, 0.5], [0.2, 0.8]]]).log()
    confidence = torch.tensor([[0.0, 1.0]])
    loss, accepted = draft_loss(drafted, target, torch.tensor([[0, 1]]), confidence)
    assert accepted.tolist() == [[1.0, pytest.approx(0.3)]]
    cross_entropy = -(math.log(0.5) + math.log(0.1)) / 2
    sure = 1 / (1 + math.exp(-1))
    binary = -(math.log(0.5) + 0.3 * math.log(sure) + 0.7 * math.log(1 - sure)) / 2
    assert float(loss) == pytest.approx(0.1 * cross_entropy + 0.9 * 0.35 + binary)


def test_what_learns_from_what() -> None:
    """The text teaches the target all but what only chooses; indexers learn from attention; drafts change no target."""
    architecture = trained_architecture()
    weights = initial_parameters(architecture.published, seed=0)
    for name, tensor in weights.items():
        if "markov_head.head" in name or "confidence_head" in name:  # zeros let nothing through to what is before them
            tensor.data.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    ids = training_batch(architecture.target.vocab_size, 0, 3, 129, seed=0)
    output = Target(architecture, weights).forward(ids[:, :-1])
    functional.cross_entropy(output.logits.flatten(0, 1), ids[:, 1:].flatten()).backward(retain_graph=True)
    learnt = {name for name, p in weights.items() if p.grad is not None and bool(p.grad.any())}
    chooses = {n for n in weights if ".indexer." in n or n.endswith((".gate.bias", ".gate.bias_vl"))}
    assert learnt == {name for name in weights if not is_draft(name)} - chooses
    _clear(weights)
    output.index_loss.backward()
    learnt = {name for name, p in weights.items() if p.grad is not None and bool(p.grad.any())}
    assert learnt == {name for name in weights if ".indexer." in name}
    _clear(weights)
    for name, parameter in weights.items():
        parameter.requires_grad_(is_draft(name))
    states, logits = output.states.detach(), output.logits.detach()
    places = torch.arange(1, 121, 3).expand(3, -1)
    block_losses(Draft(architecture, weights), ids, states, logits, places)[0].backward()
    learnt = {name for name, p in weights.items() if p.grad is not None and bool(p.grad.any())}
    assert learnt == {name for name in weights if is_draft(name)} - chooses


def _clear(weights: dict[str, torch.Tensor]) -> None:
    for parameter in weights.values():
        parameter.grad = None


def test_balance_moves_biases_towards_the_mean() -> None:
    weights = {"layers.0.ffn.gate.bias": torch.zeros(3)}
    balance(weights, {"layers.0.ffn": torch.tensor([1, 4, 7])}, 0.5)
    assert weights["layers.0.ffn.gate.bias"].tolist() == [0.5, 0.0, -0.5]


def test_schedule_rises_and_falls() -> None:
    rates = [schedule(step / 1000) for step in range(1001)]
    top = rates.index(max(rates))
    assert rates[0] == 0 and top == 50 and rates[top] == 1 and rates[-1] == pytest.approx(0.05)
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)


def test_a_short_run_learns_and_is_repeatable(tmp_path: Path) -> None:
    lines: list[str] = []
    for name in ("one", "two"):
        make_pair(tmp_path / name, SHORT, report=lines.append)
    card = json.loads((tmp_path / "one" / "card.json").read_text())
    weights = (tmp_path / "one" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "two" / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == card["sha256"]
    assert card["recipe"]["target_steps"] == 30 and list(card["scores"]) == list(WORKLOADS)
    nothing_learnt = math.log(trained_architecture().target.vocab_size)
    assert all(of["loss"] < 0.9 * nothing_learnt for of in card["scores"].values())
    assert any(line.startswith("target 25/30: loss ") for line in lines)
    assert any(line.startswith("draft 10/10: loss ") for line in lines)


def test_bad_recipes_end_before_training(tmp_path: Path) -> None:
    def untouched(line: str) -> None:
        raise AssertionError(line)

    with pytest.raises(CheckpointError, match="0 and 10 steps are too few"):
        make_pair(tmp_path / "x", Recipe(target_steps=0, draft_steps=10), report=untouched)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        make_pair(tmp_path, SHORT, report=untouched)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file"]
