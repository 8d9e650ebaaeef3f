"""`deepinfer eval` on the trained pair: answers, log-likelihoods, samples, interruptions, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_vllm.checkpoint.tokenizer import build_tokenizer
from deepinfer_vllm.cli import main
from deepinfer_vllm.evaluation.questions import Asker
from deepinfer_vllm.evaluation.settings import Settings, sampling_params
from deepinfer_vllm.evaluation.task import read_task
from deepinfer_vllm.training.architecture import TRAINED, trained_architecture
from deepinfer_vllm.training.shipped import shipped_weights, write_trained
from deepinfer_vllm.training.target import Target

ALONE = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 1}
"""One request at a time without shared prefixes: then a reply does not depend on what else is asked."""
ENGINE = ("--engine-arg", json.dumps({**ALONE, "enable_prefix_caching": False}))
BRIEF = ("--max-tokens", "12", "--thinking", "off")
TASK = read_task("builtin:mixed")

ENDED = """
import os, sys
from pathlib import Path
from deepinfer_vllm.cli import main
from deepinfer_vllm.evaluation.results_file import ResultsFile

number, file, lines, *words = sys.argv[1:]
append = ResultsFile.append


def append_and_end(self, record):
    append(self, record)
    if Path(file).read_bytes().count(b"\\n") >= int(lines):
        os.kill(os.getpid(), int(number))


ResultsFile.append = append_and_end
sys.argv[1:] = words
main.main()
"""
"""A run that a signal ends as soon as its file has so many lines."""

Json = dict[str, Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluated") / "pair"
    write_trained(directory, dtype="float32")
    return directory


def command(pair: Path, out: Path, *more: str, task: str = "builtin:mixed") -> list[str]:
    return ["eval", "--task", task, str(pair), "--out", str(out), *more]


def results(out: Path, task: str = "mixed") -> dict[str, Json]:
    lines = [json.loads(line) for line in (out / f"{task}.pair.jsonl").read_text().splitlines()]
    assert len({line["id"] for line in lines[1:]}) == len(lines) - 1
    return {line["id"]: line for line in lines[1:]}


def summary(out: Path, task: str = "mixed") -> Json:
    found: Json = json.loads((out / f"{task}.pair.summary.json").read_text())
    return found


@pytest.fixture(scope="module")
def answered(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole task, in one go."""
    out = tmp_path_factory.mktemp("whole")
    assert main.run(command(pair, out, *ENGINE, *BRIEF)) == 0
    return out


def test_the_trained_model_answers_what_it_was_trained_for(answered: Path) -> None:
    """Greedy replies, known since the weights are; questions of another kind than its texts it cannot answer."""
    found, told = results(answered), summary(answered)
    assert found.keys() == {item.id for item in TASK.items}
    assert found["count-up"]["samples"][0]["text"] == " 51" and found["count-up"]["correct"] == [True]
    assert found["flag"]["samples"][0]["text"] == " false" and found["flag"]["correct"] == [True]
    right = sum(record["correct"] == [True] for record in found.values())
    assert told["accuracy"]["mean"] == right / 50 and told["accuracy"]["low"] < right / 50 < told["accuracy"]["high"]
    assert (told["items"], told["answered"], told["failed"]) == (50, 50, [])
    assert sum(told["finish_reasons"].values()) == sum(told["found_by"].values()) == 50
    assert told["generated_tokens"] == sum(record["samples"][0]["tokens"] for record in found.values())
    assert {kind: shares["items"] for kind, shares in told["kinds"].items()} == {
        "choice": 18,
        "exact": 16,
        "integer": 16,
    }


@pytest.mark.parametrize(
    "spoilt", [{}, {"samples": None}, {"samples": [{"text": 5, "thinks": False}]}, {"options": []}], ids=str
)
def test_a_result_that_somebody_edited_is_one_line(
    answered: Path, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoilt: Json
) -> None:
    first, second, *others = (answered / "mixed.pair.jsonl").read_text().splitlines()
    line = json.dumps({"id": json.loads(second)["id"], "kind": "exact", **spoilt})
    (tmp_path / "mixed.pair.jsonl").write_text("\n".join([first, line, *others]) + "\n")
    assert main.run(command(pair, tmp_path, *ENGINE, *BRIEF)) == 1
    error = capsys.readouterr().err
    assert "is damaged: remove that line, or begin anew with --fresh" in error and error.count("\n") == 1


def test_interrupted_and_killed_it_goes_on_where_it_was(pair: Path, answered: Path, tmp_path: Path) -> None:
    """By Ctrl-C, then by SIGKILL, both in the middle; what the third run adds makes it the file of one run."""
    file, words = tmp_path / "mixed.pair.jsonl", command(pair, tmp_path, *ENGINE, *BRIEF)
    for number, answers in ((signal.SIGINT, 5), (signal.SIGKILL, 11)):
        told = subprocess.run(
            [sys.executable, "-c", ENDED, str(int(number)), str(file), str(1 + answers), *words],
            stderr=subprocess.PIPE,
            text=True,
            timeout=600,
            check=False,
        )
        if number == signal.SIGINT:
            assert told.returncode == 130
            assert "interrupted; what was answered is in" in told.stderr.splitlines()[-1]
        else:
            assert told.returncode == -signal.SIGKILL
        before = file.read_bytes().count(b"\n")
    assert 11 <= before < 51
    kept = results(tmp_path)
    assert main.run(command(pair, tmp_path, *ENGINE, *BRIEF)) == 0
    assert results(tmp_path) == results(answered) and kept.items() <= results(tmp_path).items()
    assert summary(tmp_path) == summary(answered)


def test_a_finished_file_is_summed_up_without_an_engine(
    pair: Path, answered: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stricter scoring, and fewer items, are other views on the same answers."""
    monkeypatch.setattr("deepinfer_vllm.evaluation.run.offline_engine", None)
    whole = (answered / "mixed.pair.jsonl").read_bytes()
    capsys.readouterr()
    assert main.run([*command(pair, answered, *ENGINE, *BRIEF), "--strict", "--limit", "40", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told == summary(answered) and told["strict"] and told["items"] == 40 and "last" not in told["found_by"]
    assert main.run(command(pair, answered, *ENGINE, *BRIEF)) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("mixed.pair: 50 of 50 items, ")
    assert (answered / "mixed.pair.jsonl").read_bytes() == whole


def test_other_settings_do_not_continue_it(
    pair: Path, answered: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_NUMERICS", "qat")
    assert main.run(command(pair, answered, *ENGINE, *BRIEF, "--seed", "3", "--temperature", "0.5")) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "holds results of other settings: " in error
    for part in ('environment was {} and is {"DEEPINFER_VLLM_NUMERICS": "qat"}', "seed was 0 and is 3"):
        assert part in error


def test_samples_are_drawn_by_seed_and_item(pair: Path, tmp_path: Path) -> None:
    """Whatever was answered before: a file cut in the middle is completed with the samples it had."""
    words = command(pair, tmp_path, *ENGINE, *BRIEF, "--samples", "3", "--limit", "8", "--temperature", "1")
    assert main.run(words) == 0
    whole, told = results(tmp_path), summary(tmp_path)
    file = tmp_path / "mixed.pair.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert main.run(words) == 0
    assert results(tmp_path) == whole and summary(tmp_path) == told
    seeds = [sample["seed"] for record in whole.values() for sample in record["samples"]]
    assert len({*seeds}) == 24
    assert len({sample["text"] for sample in whole["planet"]["samples"]}) > 1
    assert told["pass_at_k"].keys() == {"1", "2", "3"} and told["samples"] == 3
    assert told["pass_at_k"]["1"] == pytest.approx(told["accuracy"])


def test_the_likelihood_of_an_option_is_the_models(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums of log-softmax over the option's tokens, from the model written anew for training. One that is too long for
    the context fails with its reason, and alone."""
    target = Target(trained_architecture(), {name: tensor.float() for name, tensor in shipped_weights().items()})
    tokenizer = build_tokenizer(TRAINED.vocab_size)
    (item,) = [item for item in TASK.items if item.id == "who"]
    task = tmp_path / "task.jsonl"
    lines = [
        {"prompt": item.question, "choices": list(item.options), "answer": "B", "id": "who"},
        {"question": "word " * 2000, "choices": ["a", "b"], "answer": "B", "id": "long"},
        {"question": "word " * 2000, "answer": "x", "id": "long too"},
    ]
    task.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    speculative = 'speculative_config={"method": "dspark", "num_speculative_tokens": 5}'
    words = command(pair, out, *ENGINE, "--choices", "loglikelihood", "--engine-arg", speculative, task=str(task))
    assert main.run(words) == 0
    found = results(out, "task")
    prompt = tokenizer.encode(item.question).ids
    for option, text in zip(found["who"]["options"], item.options, strict=True):
        tail = tokenizer.encode(text, add_special_tokens=False).ids
        with torch.no_grad():
            logits = target.forward(torch.tensor([prompt + tail])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(tail)[:, None]).sum().item()
        assert option["logprob"] == pytest.approx(wanted, abs=2e-2)
        assert (option["tokens"], option["bytes"]) == (len(tail), len(text))
    for name in ("long", "long too"):
        assert "maximum context length is 512" in found[name]["failed"]
    assert "  2 failed, and count as wrong; the first, long: " in capsys.readouterr().out
    assert summary(out, "task")["accuracy"]["mean"] in (0, 1 / 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--task", "absent.jsonl"], "absent.jsonl: No such file or directory"),
        (["--task", "builtin:none"], "builtin:none: no such task; there is builtin:mixed"),
        (["--samples", "4", "--temperature", "0"], "--samples 4 at --temperature 0: all would be equal"),
        (["--samples", "4", "--choices", "loglikelihood"], "log-likelihoods are not sampled"),
        (["--choices", "loglikelihood", "--thinking", "high"], "--thinking high: an option's log-likelihood"),
        (["--thinking", "medium"], "--thinking 'medium': auto, on, off, low, high, xhigh, max or a number"),
        (["--thinking", "101"], "--thinking '101': auto"),
        (["--engine-arg", "max_model_lem=4"], "--engine-arg max_model_lem: vLLM has no such name; max_model_len?"),
        (["--engine-arg", "dtype"], "--engine-arg 'dtype': give key=value, or a JSON object"),
        (["--engine-arg", "{dtype}"], "--engine-arg '{dtype}': no JSON"),
        (["--engine-arg", "model=x"], "--engine-arg model: vLLM has no such name"),
        (["--sampling", "temprature=1"], "--sampling temprature: vLLM has no such name"),
        (["--sampling", "n=2"], "--sampling n: vLLM has no such name"),
        (["--sampling", "output_kind=1"], "--sampling output_kind: vLLM has no such name"),
        (["--sampling", "top_p=abc"], "sampling parameters: Expected `float`, got `str` - at `$.top_p`"),
        (["--sampling", "top_p=2"], "top_p must be in (0, 1], got 2.0"),
        (["--sampling", "stop=5"], "got `int` - at `$.stop`"),
        (["--sampling", 'structured_outputs={"regex": "a", "json": {}}'], "only use one kind of structured outputs"),
        (["--system", os.fsdecode(b"\xff")], "--system '\\udcff' is not UTF-8"),
        (["--out", "/dev/null"], "name another place by --out"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], says: str, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*command(pair, tmp_path), *arguments]) == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("deepinfer: eval: ") and says in output.err


def test_what_vllm_refuses_is_one_line(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine argument of the wrong value, a directory without a model, and none that is there at all."""
    assert main.run(command(pair, tmp_path / "a", "--engine-arg", "dtype=float33")) == 1
    assert main.run(["eval", "--task", "builtin:mixed", str(tmp_path), "--out", str(tmp_path / "b")]) == 1
    assert main.run(["eval", "--task", "builtin:mixed", str(tmp_path / "no"), "--out", str(tmp_path / "c")]) == 1
    assert main.run(["eval", "--task", "builtin:mixed", "no-such-model", "--out", str(tmp_path / "d")]) == 1
    lines = capsys.readouterr().err.splitlines()
    errors = [line.removeprefix("deepinfer: eval: ") for line in lines if line.startswith("deepinfer: eval: ")]
    assert len(errors) == 4 and errors[0].startswith("dtype = 'float33': ") and str(tmp_path) in errors[1]
    assert str(tmp_path / "no") in errors[2] and errors[3].startswith("no-such-model: ")


def test_what_is_recorded_is_what_answers_depend_on(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights by their content, and no secrets."""
    monkeypatch.setenv("DEEPINFER_VLLM_DECODER_REPLAY", "0")
    settings = Settings(seed=3, strict=True, engine={"hf_token": "secret", "dtype": "float32"})
    found = settings.recorded(TASK, str(pair))
    assert found["engine"] == {"dtype": "float32"} and settings.engine["hf_token"] == "secret"
    assert found["environment"]["DEEPINFER_VLLM_DECODER_REPLAY"] == "0" and "strict" not in found
    assert found["task_sha256"] == TASK.digest and len(found["weights"]) == 64
    assert settings.recorded(TASK, "org/name")["weights"] is None
    config = pair / "config.json"
    before = config.read_text()
    config.write_text(before + " ")
    assert settings.recorded(TASK, str(pair))["weights"] != found["weights"]
    config.write_text(before)


def test_sampling_parameters_are_what_json_says(pair: Path) -> None:
    """One text that ends replies is not its letters; objects become vLLM's own."""
    from vllm.tokenizers.deepseek_v41 import DeepseekV41Tokenizer

    params = sampling_params({"structured_outputs": {"regex": "[0-9]+"}, "logit_bias": {"7": 5}, "stop": None})
    assert params.structured_outputs.regex == "[0-9]+" and params.logit_bias == {7: 5.0}
    item = next(item for item in TASK.items if item.id == "count-up")
    tokenizer = DeepseekV41Tokenizer.from_pretrained(str(pair))
    for stop in ("END", ["END"]):
        (question,) = Asker(tokenizer, Settings(sampling={"stop": stop}), {}).questions(item)
        assert question.sampling["stop"] == ["END", "\n"]


@pytest.mark.parametrize(
    ("thinking", "thinks"), [("auto", True), ("on", True), ("off", False), ("low", True), ("max", True), ("77", True)]
)
def test_questions_go_through_v41s_own_form(pair: Path, thinking: str, thinks: bool) -> None:
    """As the official encoding has them, from vLLM's copy; the reply begins inside the reasoning or after it."""
    from vllm.tokenizers.deepseek_v41 import DeepseekV41Tokenizer

    tokenizer = DeepseekV41Tokenizer.from_pretrained(str(pair))
    settings = Settings(thinking=thinking, system="Be brief.", samples=2, temperature=0.5, sampling={"stop": ["X"]})
    asker = Asker(tokenizer, settings, {"top_p": 0.9, "temperature": 0.1})
    item = next(item for item in TASK.items if item.id == "planet")
    first, second = asker.questions(item)
    prompt = tokenizer.decode(first.token_ids)
    assert first.thinks == thinks and prompt.endswith("<think>" if thinks else "</think>")
    assert "Be brief." in prompt and "<｜User｜>Which planet is nearest to the Sun?\n\nA) Venus\nB) Mercury" in prompt
    assert second.token_ids == first.token_ids and second.sampling["seed"] != first.sampling["seed"]
    assert {**first.sampling, "seed": None} == {
        **{"top_p": 0.9, "temperature": 0.5, "max_tokens": 2048},
        **{"stop": ["X"], "seed": None},
    }
    raw = next(item for item in TASK.items if item.id == "count-up")
    (question, _) = asker.questions(raw)
    assert tokenizer.decode(question.token_ids, skip_special_tokens=True) == raw.question
    assert question.sampling["stop"] == ["X", "\n"] and not question.thinks
