"""The offline commands of DSpark: what they write is what the engine computed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_vllm.cli import main
from deepinfer_vllm.spec_decode import trace_files
from deepinfer_vllm.spec_decode.calibrate import from_prompts
from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.calibration_file import NAME, Made, checkpoint_digest, write
from deepinfer_vllm.spec_decode.calibration_file import read as read_calibration
from deepinfer_vllm.spec_decode.offline import EngineChoice
from deepinfer_vllm.spec_decode.records import read
from engine.test_dspark import COUNT, DRAFT, DRAFTS, Case, make_case, start
from reference import load
from reference.dspark import DraftReference


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("dspark-offline"))


@pytest.fixture(scope="module")
def prompts(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in case.prompts))
    return file


def command(*arguments: object) -> int:
    return main.run([*map(str, arguments), "--dtype", "float32", "--temperature", "0"])


def test_a_trace_is_what_a_draft_model_reads_of_the_target(
    case: Case, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """States, logits and the draft block made from them, of whole texts, beyond the window and in any chunks."""
    out = tmp_path / "trace"
    assert command("dspark-trace", case.directory, "--prompts", prompts, "--out", out, "--max-tokens", COUNT) == 0
    assert f"{out}: 4 texts, 278 tokens, 0.0002" in capfd.readouterr().out
    texts = list(trace_files.read(out))
    assert [text.input_ids.tolist() for text in texts] == [
        p + a for p, a in zip(case.prompts, case.answers, strict=True)
    ]
    layers = DRAFT["extra"]["dspark_target_layer_ids"]
    assert trace_files.read_manifest(out)["target_layer_ids"] == layers
    head, draft = case.reference.weights["head.weight"], drafter(case)
    for prompt, text in zip(case.prompts, texts, strict=True):
        want = case.reference.forward(text.input_ids.tolist())
        assert text.loss_mask.tolist() == [0] * len(prompt) + [1] * COUNT
        states = torch.cat([want.stream_means[layer] for layer in layers], dim=-1)
        assert (text.target_hidden_states - states).abs().max() < 2e-4
        assert (text.target_last_hidden_states.double() @ head.double().T - want.logits).abs().max() < 2e-4
        width = text.target_last_hidden_states.shape[1]
        by_layer = {layer: text.target_hidden_states[:, i * width :][:, :width] for i, layer in enumerate(layers)}
        means = torch.stack([by_layer.get(i, torch.zeros(len(states), width)) for i in range(max(layers) + 1)])
        anchor, at = int(text.input_ids[len(prompt)]), len(prompt)
        found = draft.draft(draft.main_x(means[:, :at]), anchor, 5)
        assert found.tokens == draft.draft(draft.main_x(want.stream_means[:, :at]), anchor, 5).tokens


def drafter(case: Case) -> DraftReference:
    """Of the checkpoint as it is now, with foresight."""
    reference = load(case.directory)
    return DraftReference(reference.config, reference.weights)


def expected_drafts(case: Case, prompt: list[int], answer: list[int]) -> list[tuple[list[float], int]]:
    """By the reference: confidences and accepted tokens of the drafts of a greedy engine, one after the other."""
    text, drafts, at = prompt + answer, [], len(prompt)
    main = drafter(case)
    x = main.main_x(case.reference.forward(text).stream_means)
    while at < len(text) - 1:
        draft = main.draft(x[:at], text[at], DRAFTS)
        longer = case.reference.greedy(text[: at + 1], DRAFTS)
        stands = next((i for i in range(DRAFTS) if draft.tokens[i] != longer[i]), DRAFTS)
        drafts.append((draft.confidence.tolist(), stands))
        at += stands + 1
    return drafts


def test_records_are_the_drafts_of_the_run(case: Case, prompts: Path) -> None:
    """Each draft once, with the confidences of its own block and what became of it."""
    choice = EngineChoice(drafts=DRAFTS, dtype="float32")
    made, found = from_prompts(case.directory, prompts, choice, COUNT, 0.0)
    assert made == Made(checkpoint_digest(case.directory), DRAFTS, "float32", "plain", "greedy")
    assert found.drafted.tolist() == [DRAFTS] * len(found.drafted)
    expected = [expected_drafts(case, p, a) for p, a in zip(case.prompts, case.answers, strict=True)]
    assert len(found.drafted) == sum(map(len, expected))
    for drafts in expected:
        # A request's number in the file is a hash of its id: it is the one whose first confidences are these.
        first = np.abs(found.confidences - drafts[0][0]).max(axis=1).argmin()
        rows = found.requests == found.requests[first]
        assert found.accepted[rows].tolist() == [stands for _, stands in drafts]
        assert np.abs(found.confidences[rows] - [confidences for confidences, _ in drafts]).max() < 2e-4


def test_a_calibration_of_random_answers_in_bfloat16(
    case: Case, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As most engines run, and with the temperature of the checkpoint."""
    out = tmp_path / "calibration.json"
    arguments = [case.directory, "--prompts", prompts, "--out", out, "--max-tokens", COUNT, "--dtype", "bfloat16"]
    arguments += ["--draft-sample-method", "probabilistic"]
    assert main.run(["calibrate-dspark", *map(str, arguments)]) == 0
    calibration, made = read_calibration(out)
    assert made == Made(checkpoint_digest(case.directory), DRAFTS, "bfloat16", "plain", "probabilistic")
    assert f"Fitting {calibration.outcomes[0]} probabilistic drafts of 5 tokens." in capfd.readouterr().out
    assert calibration.is_identity and calibration.outcomes[0] > 20 and "are needed" in calibration.note


def by_position(metrics: list[Any], name: str) -> list[float]:
    """A counter of DSpark's metrics, by draft position."""
    found = {int(m.labels["position"]): m.value for m in metrics if m.name == f"vllm:deepinfer_dspark_{name}"}
    return [found[position] for position in sorted(found)]


def test_an_engine_uses_its_calibration_and_records_what_its_budget_verifies(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Confidences as the head gave them, not the calibrated ones; drafts as far as they were verified."""
    record, beside = tmp_path / "records", case.directory / NAME
    monkeypatch.setenv("DEEPINFER_VLLM_DSPARK_RECORD", str(record))
    made = Made(checkpoint_digest(case.directory), DRAFTS, "float32", "plain", "greedy")
    write(beside, Calibration((0.5, 2.0, 2.0, 2.0, 2.0)), made)
    try:
        backend = start(case)
    finally:
        beside.unlink()
    try:
        found = backend.generate_many(case.prompts, COUNT, logits=False)
        assert [f.ids for f in found] == case.answers
        metrics = backend._llm.get_metrics()
        verified, accepted = (by_position(metrics, f"{kind}_tokens") for kind in ("verified", "accepted"))
        assert verified[0] > 0
        deadline = time.monotonic() + 60
        while not record.exists() or len(read(record)[made].drafted) < verified[0]:
            assert time.monotonic() < deadline, "nothing was recorded"
            time.sleep(0.1)
        assert {m.value for m in metrics if m.name == "vllm:deepinfer_dspark_calibrated"} == {1.0}
    finally:
        backend.close()
    ((of, drafts),) = read(record).items()
    assert of == made
    for counts, kind in ((drafts.drafted, verified), (drafts.accepted, accepted)):
        assert [int((counts > k).sum()) for k in range(DRAFTS)] == kind
    draft, possible = drafter(case), []
    for text in (p + a for p, a in zip(case.prompts, case.answers, strict=True)):
        x = draft.main_x(case.reference.forward(text).stream_means)
        possible += [draft.draft(x[:at], text[at], DRAFTS).confidence for at in range(len(text) - COUNT, len(text))]
    distance = np.abs(drafts.confidences[:, None] - torch.stack(possible).numpy()).max(axis=2)
    assert distance.min(axis=1).max() < 2e-4
