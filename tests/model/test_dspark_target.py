"""What the target hands to its draft model: mean streams at the entry of the layers asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_vllm.checkpoint.bare import BareModel
from deepinfer_vllm.models.deepseek_v41.backend import PagedRowsMetadata
from deepinfer_vllm.models.deepseek_v41.replay import BatchFacts
from reference import Reference, load
from small_model import make_step
from topologies import bare_model, write_random

SEED = 5  # compressed layers, Engram, a KV source above layer 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random")
    write_random(path, SEED)
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return load(directory)


@pytest.fixture(scope="module")
def bare(directory: Path) -> Iterator[BareModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_VLLM_MODEL", "portable")
        patch.setenv("DEEPINFER_VLLM_DECODER_REPLAY", "0")
        with bare_model(directory) as target:
            yield target


@pytest.fixture
def model(bare: BareModel) -> Iterator[Any]:
    """With every layer asked for."""
    bare.model.set_aux_hidden_state_layers(tuple(range(bare.model.config.num_layers)))
    yield bare.model
    bare.model.set_aux_hidden_state_layers(())


def prompt(bare: BareModel, length: int = 90) -> torch.Tensor:
    return torch.randint(bare.model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(SEED))


@torch.inference_mode()
def states(bare: BareModel, ids: torch.Tensor, start: int = 0, facts: BatchFacts | None = None) -> list[torch.Tensor]:
    """Auxiliary states of tokens from `start` on, of which those before have been computed."""
    tables = {cache.name: bare._table for cache in bare._caches}
    aux: list[torch.Tensor] = []
    ids = ids[start:]
    bare.model.run(make_step([(start, start + len(ids))], tables), ids, bare.model.embed(ids), facts, aux=aux)
    return aux


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_every_layer_as_the_reference(bare: BareModel, model: Any, reference: Reference) -> None:
    ids = prompt(bare)
    expected = reference.forward(ids).stream_means
    whole = states(bare, ids)
    later = [*map(torch.cat, zip(states(bare, ids[:31]), states(bare, ids, 31), strict=True))]
    assert len(whole) == len(later) == model.config.num_layers
    for aux in (whole, later):
        assert max(far(ours, theirs) for ours, theirs in zip(aux, expected, strict=True)) <= 1e-5


def test_only_what_is_asked_for(bare: BareModel, model: Any) -> None:
    ids = prompt(bare, 20)
    everything = states(bare, ids)
    model.set_aux_hidden_state_layers((1, 3))
    chosen = states(bare, ids)
    assert len(chosen) == 2 and torch.equal(chosen[0], everything[1]) and torch.equal(chosen[1], everything[3])
    model.set_aux_hidden_state_layers(())
    assert states(bare, ids) == []


def test_rows_that_replay_skips_are_zero(bare: BareModel, model: Any, reference: Reference) -> None:
    ids, window, cut = prompt(bare), model.config.window, model.config.replay_cut
    assert 0 < cut < model.config.num_layers - 1
    kept = len(ids) - window
    expected = reference.forward(ids, replay_from=kept).stream_means
    for layer, ours in enumerate(states(bare, ids, facts=BatchFacts([False], [0]))):
        assert ours.shape == expected[layer].shape
        first = kept if layer > cut else 0
        assert not ours[:first].any()
        assert far(ours[first:], expected[layer][first:]) <= 1e-5


def test_forward_gives_them_beside_the_hidden_states(bare: BareModel, model: Any) -> None:
    """Through vLLM's context, with three rows of padding, and without caches as vLLM sizes memory."""
    from vllm.forward_context import set_forward_context

    ids = prompt(bare, 12)
    padded, positions = torch.cat((ids, ids[:3])), torch.arange(15)
    shape = PagedRowsMetadata(bare._table, torch.tensor([0, 12]), torch.tensor([12]))
    metadata = {cache.name: shape for cache in bare._caches}
    expected = states(bare, ids)
    with torch.inference_mode(), set_forward_context(metadata, bare.vllm_config):
        hidden, aux = model(padded, positions)
        model.set_aux_hidden_state_layers(())
        alone = model(padded, positions)
    assert torch.equal(hidden, alone)
    assert [a.shape for a in aux] == [hidden.shape] * model.config.num_layers
    assert all(torch.equal(a[:12], e) and not a[12:].any() for a, e in zip(aux, expected, strict=True))
    model.set_aux_hidden_state_layers((0, 2))
    with torch.inference_mode(), set_forward_context(None, bare.vllm_config):
        hidden, aux = model(padded, positions)
    assert [a.shape for a in aux] == [hidden.shape] * 2


def test_what_vllm_looks_for(bare: BareModel, model: Any) -> None:
    from vllm.model_executor.models.interfaces import supports_eagle3

    assert supports_eagle3(model)
    assert model.model.embed_tokens is model.embed and model.lm_head is model.head
    layers = bare.vllm_config.model_config.hf_config.dspark_target_layer_ids
    assert model.get_eagle3_default_aux_hidden_state_layers() == tuple(layers)
