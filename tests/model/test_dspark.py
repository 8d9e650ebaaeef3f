"""The draft model against the float64 reference, on checkpoints of random topology."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bare_draft import UNWRITTEN, BareDraft
from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.models.deepseek_v41.numerics import Numerics
from reference import Config, Draft, DraftReference, load
from topologies import bare_model, write_random

SEEDS = [5, 10, 31, 38]


@dataclass
class Case:
    draft: BareDraft
    reference: DraftReference
    config: Config
    ids: torch.Tensor
    means: torch.Tensor
    """[L, T, D]: mean streams at the entry of every layer of the target, by the reference."""

    @property
    def states(self) -> torch.Tensor:
        """What the target hands to the draft model, [T, layers * D]."""
        return torch.cat([self.means[layer] for layer in self.config.dspark_target_layer_ids], dim=-1).float()

    def main_x(self, count: int) -> torch.Tensor:
        return self.reference.main_x(self.means[:, :count])


@pytest.fixture(scope="module", params=SEEDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    directory = tmp_path_factory.mktemp("random")
    ids = write_random(directory, request.param)
    reference = load(directory)
    means = reference.forward(ids).stream_means
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_VLLM_MODEL", "portable")
        patch.setenv("DEEPINFER_VLLM_DECODER_REPLAY", "0")
        with bare_model(directory) as target:
            yield Case(
                BareDraft(target), DraftReference(reference.config, reference.weights), reference.config, ids, means
            )


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and float((ours - theirs).norm() / theirs.norm()) <= 1e-5


def test_context_rows(case: Case) -> None:
    """Written in two parts, the second with rejected tokens at its end."""
    draft = case.draft
    draft.clear()
    draft.store(0, case.states[:30], start=0)
    draft.store(0, case.states[30:40], start=30, rejected=4)
    for layer in range(case.config.num_nextn_predict_layers):
        expected = case.reference.rows(case.main_x(36), layer, torch.arange(36))
        assert close(draft.rows(layer, 0, 36), expected)
        assert bool((draft.rows(layer, 0, 40)[36:] == UNWRITTEN).all())


def assert_drafts(case: Case, hidden: torch.Tensor, anchor: int, expected: Draft) -> None:
    assert close(hidden, expected.hidden)
    tokens, logits, confidence = case.draft.sample(hidden, anchor)
    assert tokens == expected.tokens
    assert float((logits - expected.logits).abs().max()) <= 2e-4
    assert float((confidence - expected.confidence).abs().max()) <= 1e-5


@pytest.mark.parametrize("length", [1, 2, 5, 7])
def test_a_block_and_its_heads(case: Case, length: int) -> None:
    """Contexts shorter than the window, of its size, around it and longer, in one batch."""
    window, draft = case.config.sliding_window, case.draft
    starts = [1, 3, window - 1, window, window + 1, 80]
    draft.clear(requests=len(starts))
    anchors = case.ids[starts].tolist()
    for request, start in enumerate(starts):
        draft.store(request, case.states[:start], start=0)
    hidden = draft.block(starts, anchors, [length] * len(starts), case.config.dspark_noise_token_id)
    for block, start, anchor in zip(hidden.split(length), starts, anchors, strict=True):
        assert_drafts(case, block, anchor, case.reference.draft(case.main_x(start), anchor, length))


def test_blocks_of_different_lengths(case: Case) -> None:
    starts, lengths, draft = [40, 5, 22], [3, 6, 1], case.draft
    draft.clear(requests=3)
    anchors = case.ids[starts].tolist()
    for request, start in enumerate(starts):
        draft.store(request, case.states[:start], start=0)
    hidden = draft.block(starts, anchors, lengths, case.config.dspark_noise_token_id)
    for block, start, anchor, length in zip(hidden.split(lengths), starts, anchors, lengths, strict=True):
        assert_drafts(case, block, anchor, case.reference.draft(case.main_x(start), anchor, length))


def test_a_request_may_say_what_blocks_are_drafted_from(case: Case) -> None:
    """The release's noise, token 128799, also begins system messages: as an anchor it is a token like any other."""
    draft, noise = case.draft, case.config.dspark_noise_token_id
    draft.clear()
    draft.store(0, case.states[:20], start=0)
    hidden = draft.block([20], [noise], [5], noise)
    assert_drafts(case, hidden, noise, case.reference.draft(case.main_x(20), noise, 5))


@pytest.mark.parametrize("start", [2, 50])
def test_a_block_after_an_accepted_prefix(case: Case, start: int) -> None:
    """A block's own rows stand where later context rows come; those of rejected tokens stay until they do."""
    draft, length, noise = case.draft, 5, case.config.dspark_noise_token_id
    draft.clear()
    draft.store(0, case.states[:start], start=0)
    for accepted in (0, 3, 5, 1):
        anchor = int(case.ids[start])
        hidden = draft.block([start], [anchor], [length], noise)
        assert_drafts(case, hidden, anchor, case.reference.draft(case.main_x(start), anchor, length))
        draft.store(0, case.states[start : start + 1 + length], start=start, rejected=length - accepted)
        start += 1 + accepted


def test_rounded_rows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rows rounded as in training; their width must be one that is rounded."""
    draft, start, anchor = case.draft, 25, int(case.ids[25])
    if case.config.head_dim % 32:
        pytest.skip("rows of this width are not rounded")
    for layer in draft.model.model.mtp:
        monkeypatch.setattr(layer.attn, "numerics", Numerics(quantised=True))
    draft.clear()
    draft.store(0, case.states[:start], start=0)
    rows = case.reference.rows(case.main_x(start), 0, torch.arange(start), qat=True)
    assert float(((draft.rows(0, 0, start) - rows).abs() > 1e-4).float().mean()) <= 0.01  # a tie may fall either way
    hidden = draft.block([start], [anchor], [4], case.config.dspark_noise_token_id)
    expected = case.reference.block(case.main_x(start), anchor, 4, qat=True)
    plain = case.reference.block(case.main_x(start), anchor, 4)
    assert float((hidden - expected).norm()) < 0.2 * float((plain - expected).norm())


def test_a_quantised_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published formats, held packed: the reference widens the same codes."""
    monkeypatch.setenv("DEEPINFER_VLLM_WEIGHTS", "packed")
    create(tmp_path, layers=4, quant=True)
    reference, ids = load(tmp_path), torch.arange(40, 70)
    means = reference.forward(ids).stream_means
    drafts = DraftReference(reference.config, reference.weights)
    with bare_model(tmp_path) as target:
        draft = BareDraft(target)
        assert len([p for p in draft.model.parameters() if p.dtype == torch.float8_e4m3fn]) > 10
        case = Case(draft, drafts, reference.config, ids, means)
        draft.clear()
        draft.store(0, case.states, start=0)
        hidden = draft.block([30], [7], [5], reference.config.dspark_noise_token_id)
        assert_drafts(case, hidden, 7, drafts.draft(case.main_x(30), 7, 5))
