"""Train the target on texts, then its draft layers on the target."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from deepinfer_vllm.training.architecture import Architecture
from deepinfer_vllm.training.batches import training_batch
from deepinfer_vllm.training.draft import Draft
from deepinfer_vllm.training.experts import balance
from deepinfer_vllm.training.losses import draft_loss
from deepinfer_vllm.training.optimiser import Optimiser
from deepinfer_vllm.training.parameters import Weights, initial_parameters
from deepinfer_vllm.training.target import Target

Report = Callable[[str], None]
"""Told a line now and then."""


@dataclass(frozen=True)
class Recipe:
    """How long and how fast; the defaults made the shipped weights."""

    seed: int = 0
    length: int = 256  # tokens a row
    rows: int = 4  # texts a step
    target_steps: int = 500
    target_rate: float = 4e-3
    draft_steps: int = 800
    draft_rate: float = 6e-3
    anchors: int = 48  # blocks of each row
    balance: float = 1e-3  # what a step moves an expert's bias
    judged: int = 16  # held-out texts of each kind that the scores are of


def train(architecture: Architecture, recipe: Recipe, report: Report) -> Weights:
    """All tensors of the checkpoint. The same recipe gives the same ones on the same machine and number of threads."""
    parameters = initial_parameters(architecture.published, recipe.seed)
    _train_target(architecture, parameters, recipe, report)
    for name, parameter in parameters.items():
        parameter.requires_grad_(is_draft(name))
    _train_draft(architecture, parameters, recipe, report)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def is_draft(name: str) -> bool:
    """Whether a tensor belongs to the draft layers."""
    return name.startswith("mtp.")


def _train_target(architecture: Architecture, parameters: Weights, recipe: Recipe, report: Report) -> None:
    target = Target(architecture, parameters)
    own = {name: p for name, p in parameters.items() if not is_draft(name)}
    optimiser, progress = Optimiser(own, recipe.target_rate, recipe.target_steps), Progress("target", report)
    for step in range(recipe.target_steps):
        ids = _batch(architecture, recipe, step)
        output = target.forward(ids[:, :-1])
        loss = functional.cross_entropy(output.logits.flatten(0, 1), ids[:, 1:].flatten())
        (loss + output.index_loss).backward()
        optimiser.step()
        balance(parameters, output.loads, recipe.balance)
        progress(step + 1, recipe.target_steps, {"loss": loss, "indexer": output.index_loss})


def _train_draft(architecture: Architecture, parameters: Weights, recipe: Recipe, report: Report) -> None:
    target, draft = Target(architecture, parameters), Draft(architecture, parameters)
    own = {name: p for name, p in parameters.items() if is_draft(name)}
    optimiser, progress = Optimiser(own, recipe.draft_rate, recipe.draft_steps), Progress("draft", report)
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(recipe.draft_steps):
        ids = _batch(architecture, recipe, recipe.target_steps + step)
        with torch.no_grad():
            output = target.forward(ids[:, :-1])
        last = recipe.length - draft.size
        places = torch.randint(1, last, (recipe.rows, recipe.anchors), generator=generator)
        loss, accepted, loads = block_losses(draft, ids, output.states, output.logits, places)
        loss.backward()
        optimiser.step()
        balance(parameters, loads, recipe.balance)
        progress(step + 1, recipe.draft_steps, {"loss": loss, "length": 1 + accepted.cumprod(-1).sum(-1).mean()})


def block_losses(
    draft: Draft, ids: torch.Tensor, states: torch.Tensor, logits: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, acceptance [B, A, G], expert loads) of blocks at places [B, A] of ids [B, T + 1].

    states [B, T, layers * D] and logits [B, T, V] are the target's of ids [B, T].
    """
    blocks = draft.blocks(states, ids[:, :-1], places)
    at = places.unsqueeze(-1) + torch.arange(draft.size)  # the token before each drafted one
    row = torch.arange(len(ids)).view(-1, 1, 1)
    embedded, bias = draft.markov(ids[row, at])
    confidence = draft.confidence(blocks.hidden, embedded)
    loss, accepted = draft_loss(blocks.logits + bias, logits[row, at], ids[row, at + 1], confidence)
    return loss, accepted, blocks.loads


def _batch(architecture: Architecture, recipe: Recipe, step: int) -> torch.Tensor:
    return training_batch(architecture.target.vocab_size, step, recipe.rows, recipe.length + 1, recipe.seed)


class Progress:
    """A line every so many steps: running means, and the time that is left."""

    EVERY = 25

    def __init__(self, phase: str, report: Report) -> None:
        self.phase, self.report, self.start = phase, report, time.monotonic()
        self.means: dict[str, float] = {}

    def __call__(self, step: int, steps: int, values: dict[str, torch.Tensor]) -> None:
        """After `step` of `steps`."""
        for name, value in values.items():
            now = value.item()
            self.means[name] = 0.95 * self.means.get(name, now) + 0.05 * now
        if step % self.EVERY == 0 or step == steps:
            left = (time.monotonic() - self.start) / step * (steps - step)
            means = ", ".join(f"{name} {mean:.3f}" for name, mean in self.means.items())
            self.report(f"{self.phase} {step}/{steps}: {means}; {left:.0f} s left")
