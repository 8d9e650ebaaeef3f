"""`deepinfer checkpoint trained`: the shipped weights as a published checkpoint, and prompts for it."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from deepinfer_vllm.checkpoint.tokenizer import build_tokenizer
from deepinfer_vllm.cli.checkpoint import app
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.training import shipped
from deepinfer_vllm.training.architecture import TRAINED, trained_architecture
from deepinfer_vllm.training.evaluate import evaluate
from deepinfer_vllm.training.shipped import card, shipped_weights
from deepinfer_vllm.training.texts import WORKLOADS, text
from legal_config import assert_legal

FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def run(*arguments: object) -> str:
    """Its output; one line of error where it ends with 2."""
    result = CliRunner().invoke(app, ["trained", *map(str, arguments)])
    assert result.exit_code in (0, 2), result.output
    assert result.exit_code == 0 or result.output.count("\n") == 1
    return result.output


def test_a_checkpoint_of_either_dtype(tmp_path: Path) -> None:
    assert "1,185,492 parameters" in run(tmp_path / "bf16")
    run(tmp_path / "float32", "--dtype", "float32")
    narrow, wide = (load_file(tmp_path / name / "model.safetensors") for name in ("bf16", "float32"))
    assert narrow.keys() == wide.keys() == shipped_weights().keys()
    assert all(torch.equal(narrow[name].float(), wide[name]) for name in wide)
    for name, dtype in (("bf16", "bfloat16"), ("float32", "float32")):
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == FILES
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config == TRAINED.published(dtype)
        assert_legal(config)
    assert len(files(shipped.__package__).joinpath(shipped.WEIGHTS).read_bytes()) < 4e6


def test_other_weights_than_the_cards_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(files(shipped.__package__).joinpath(shipped.WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / shipped.WEIGHTS).write_bytes(content)
    (tmp_path / shipped.CARD).write_text(json.dumps(card()))
    monkeypatch.setattr(shipped, "files", lambda package: tmp_path)
    with pytest.raises(CheckpointError, match="the shipped pair.safetensors has sha256"):
        shipped_weights()


def test_the_card_is_of_these_weights() -> None:
    """A smaller sample of held-out texts than the card's gives about the same."""
    weights = {name: tensor.float() for name, tensor in shipped_weights().items()}
    found, told = evaluate(trained_architecture(), weights, rows=4), card()["scores"]
    assert list(found) == list(told) == list(WORKLOADS)
    for name, scores in found.items():
        assert scores.loss == pytest.approx(told[name]["loss"], abs=0.15)
        assert scores.greedy_length == pytest.approx(1 + sum(told[name]["greedy"]), abs=0.5)
        assert 1 + sum(scores.confidence) == pytest.approx(scores.random_length, abs=0.4)
    lengths = [scores.greedy_length for scores in found.values()]
    assert min(lengths) < 3 < 4.5 < max(lengths) < 5.5


def test_prompts_are_beginnings_of_held_out_texts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    assert run("--prompts", file, "--count", 14, "--tokens", 40, "--first", 5) == f"{file}: 14 prompts\n"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["workload"] for line in lines] == [*WORKLOADS, *WORKLOADS, "records", "code"]
    tokenizer = build_tokenizer(TRAINED.vocab_size)
    for i, line in enumerate(lines):
        assert text(line["workload"], 5 + i // 6).startswith(line["prompt"])
        assert 38 <= len(tokenizer.encode(line["prompt"]).ids) <= 42
    run("--prompts", file, "--workload", "sums", "--workload", "noise", "--count", 3)
    assert [json.loads(line)["workload"] for line in file.read_text().splitlines()] == ["sums", "noise", "sums"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to write"),
        (["--prompts", "x.jsonl", "--count", "0"], "count 0 is too small"),
        (["--prompts", "x.jsonl", "--tokens", "0"], "tokens 0 is too small"),
        (["--prompts", "x.jsonl", "--first", "-1"], "first -1 is too small"),
        (["--prompts", "x.jsonl", "--workload", "poems"], "unknown workload poems: choose from records, code"),
        (["DIR", "--dtype", "int4"], "unknown dtype 'int4'"),
        (["."], "is not empty"),
        (["--prompts", "missing/x.jsonl"], "missing/x.jsonl"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").touch()
    monkeypatch.chdir(tmp_path)
    assert message in run(*arguments)
    assert [file.name for file in tmp_path.iterdir()] == ["occupied"]
