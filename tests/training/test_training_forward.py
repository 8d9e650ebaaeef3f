"""The differentiable forward pass: the values of the float64 reference and of the plugin's modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bare_draft import BareDraft
from deepinfer_vllm.training.architecture import Architecture, trained_architecture
from deepinfer_vllm.training.batches import held_out_batch
from deepinfer_vllm.training.draft import Draft
from deepinfer_vllm.training.parameters import Weights, initial_parameters
from deepinfer_vllm.training.shipped import shipped_weights, write_pair
from deepinfer_vllm.training.target import Output, Target
from reference import DraftReference, Reference, load
from topologies import bare_model

TOKENS, LIMIT = 180, 1e-4


@dataclass
class Case:
    architecture: Architecture
    weights: Weights
    directory: Path
    ids: torch.Tensor
    output: Output
    reference: Reference


def shaken(weights: Weights) -> Weights:
    """No two of a tensor's values alike, no part without effect."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor.detach()
        + 0.2 * torch.randn(tensor.shape, generator=generator) * (tensor.detach().std() if tensor.std() > 0 else 1)
        for name, tensor in weights.items()
    }


@pytest.fixture(scope="module", params=["shipped", "random"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture, directory = trained_architecture(), tmp_path_factory.mktemp("pair")
    shipped = request.param == "shipped"
    weights = shipped_weights() if shipped else shaken(initial_parameters(architecture.published, seed=0))
    weights = {name: tensor.float() for name, tensor in weights.items()}
    write_pair(directory, weights, dtype="float32", force=True)
    ids = torch.cat([held_out_batch(512, workload, 1, TOKENS) for workload in ("records", "lists", "noise")])
    with torch.no_grad():
        output = Target(architecture, weights).forward(ids)
    return Case(architecture, weights, directory, ids, output, load(directory))


def largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def test_target_is_the_reference(case: Case) -> None:
    for ids, logits, states in zip(case.ids, case.output.logits, case.output.states, strict=True):
        expected = case.reference.forward(ids)
        assert largest(logits, expected.logits) <= LIMIT
        of = case.reference.config.dspark_target_layer_ids
        assert largest(states, torch.cat([expected.stream_means[layer] for layer in of], dim=-1)) <= LIMIT


def test_blocks_are_the_references(case: Case) -> None:
    """Near a text's start, where windows are not full, and far from it; each draft continued by its own tokens."""
    draft = Draft(case.architecture, case.weights)
    places = torch.tensor([1, 5, 31, 32, 33, 150]).expand(len(case.ids), -1).contiguous()
    reference = DraftReference(case.reference.config, case.reference.weights)
    with torch.no_grad():
        blocks = draft.blocks(case.output.states, case.ids, places)
        for row, ids in enumerate(case.ids):
            means = case.reference.forward(ids).stream_means
            for number, place in enumerate(places[row].tolist()):
                anchor = int(ids[place])
                expected = reference.draft(reference.main_x(means[:, :place]), anchor, draft.size)
                previous = torch.tensor([anchor, *expected.tokens[:-1]])
                embedded, bias = draft.markov(previous)
                hidden = blocks.hidden[row, number]
                assert largest(hidden, expected.hidden) <= LIMIT
                assert largest(blocks.logits[row, number] + bias, expected.logits) <= LIMIT
                assert largest(draft.confidence(hidden, embedded).sigmoid(), expected.confidence) <= 1e-5


@pytest.fixture
def plugin(case: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[BareDraft]:
    monkeypatch.setenv("DEEPINFER_VLLM_MODEL", "portable")
    monkeypatch.setenv("DEEPINFER_VLLM_DECODER_REPLAY", "0")
    with bare_model(case.directory) as target:
        draft = BareDraft(target)
        draft.target = target
        yield draft


def test_the_plugin_serves_the_same(case: Case, plugin: BareDraft) -> None:
    for ids, logits in zip(case.ids, case.output.logits, strict=True):
        assert largest(plugin.target.prefill(ids).logits, logits) <= LIMIT
    place, draft = 100, Draft(case.architecture, case.weights)
    plugin.clear()
    plugin.store(0, case.output.states[0, :place], start=0)
    anchor = int(case.ids[0, place])
    hidden = plugin.block([place], [anchor], [draft.size], draft.noise)
    blocks = draft.blocks(case.output.states[:1], case.ids[:1], torch.tensor([[place]]))
    assert largest(hidden, blocks.hidden[0, 0]) <= LIMIT
