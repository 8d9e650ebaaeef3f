"""`deepinfer calibrate-dspark` and `dspark-trace`: what they refuse and say, without an engine."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.cli import main
from deepinfer_vllm.spec_decode import calibration_file
from deepinfer_vllm.spec_decode.calibration import Calibration, fit, scaled
from deepinfer_vllm.spec_decode.calibration_file import Made, checkpoint_digest
from deepinfer_vllm.spec_decode.records import Recorder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    create(directory, layers=4, shards=1)
    return directory


def record(path: Path, made: Made, count: int, temperature: float = 2.0) -> tuple[np.ndarray, ...]:
    """Drafts of a head that is surer than it should be."""
    rng = np.random.default_rng(count)
    confidences = rng.beta(2.5, 1.0, (count, made.positions)).astype(np.float32)
    stands = rng.random(confidences.shape) < scaled(confidences, temperature)
    accepted = np.cumprod(stands, axis=1).sum(axis=1)
    drafted = np.full(count, made.positions)
    recorder = Recorder(path, made, print)
    recorder.record(confidences, drafted, accepted, [f"r{i // 50}" for i in range(count)])
    recorder.close()
    return confidences, drafted, accepted


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, output: int = 0) -> str:
    """The one line that a command ends with, after so many lines of output."""
    assert main.run([str(a) for a in arguments]) == 1
    said = capsys.readouterr()
    assert said.out.count("\n") == output and said.err.count("\n") == 1
    return said.err.removeprefix("deepinfer: ").rstrip("\n")


def test_a_fit_from_records(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of this checkpoint and the most frequent number of tokens, by requests; beside the checkpoint."""
    digest = checkpoint_digest(checkpoint)
    made = Made(digest, 3, "bfloat16", "plain", "greedy")
    confidences, drafted, accepted = record(tmp_path / "records", made, 12_000)
    record(tmp_path / "records", Made("f" * 64, 3), 20_000)
    record(tmp_path / "records", Made(digest, 2), 3_000)
    assert main.run(["calibrate-dspark", str(checkpoint), "--records", str(tmp_path / "records")]) == 0
    path = checkpoint / "dspark_calibration.json"
    found, of = calibration_file.read(path)
    path.unlink()
    hashes = np.array([zlib.crc32(f"r{i // 50}".encode()) for i in range(12_000)])
    assert of == made and found.temperatures == pytest.approx([2.0] * 3, rel=0.25) and not found.note
    assert found == fit(confidences, drafted, accepted, hashes)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Fitting 12,000 greedy drafts of 3 tokens."
    assert lines[1].split() == ["position", "outcomes", "temperature", "ECE", "before", "ECE", "after"]
    for k in range(3):
        want = [f"{found.temperatures[k]:.3f}", f"{found.ece_before[k]:.2%}", f"{found.ece_after[k]:.2%}"]
        assert lines[2 + k].split() == [str(k + 1), "12,000", *want]
        assert found.ece_after[k] < found.ece_before[k]
    assert lines[5:] == [f"Wrote {path}."]


def test_with_few_records_it_says_so(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "records", Made(checkpoint_digest(checkpoint), 5), 100)
    out = tmp_path / "c.json"
    assert main.run(["calibrate-dspark", str(checkpoint), "--records", f"{tmp_path}/records", "--out", str(out)]) == 0
    assert (
        "Note: temperature stays 1 from position 1 on: 100 outcomes are there, 1333 are needed."
        in capsys.readouterr().out
    )
    assert calibration_file.read(out)[0].is_identity
    fitted = Calibration((2.0,) * 5)
    calibration_file.write(out, fitted, Made(checkpoint_digest(checkpoint), 5))
    said = refused(capsys, "calibrate-dspark", checkpoint, "--records", tmp_path / "records", "--out", out, output=1)
    assert f"{out} is kept, as nothing better could be fitted: temperature stays 1 from position 1 on" in said
    assert calibration_file.read(out)[0] == fitted


def test_what_calibrate_refuses(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(*arguments: object) -> str:
        return refused(capsys, "calibrate-dspark", *arguments)

    records = tmp_path / "records"
    assert says(checkpoint) == "calibrate-dspark: give either --prompts FILE or --records FILE"
    assert says(checkpoint, "--prompts", "a", "--records", "b").endswith("give either --prompts FILE or --records FILE")
    assert (
        says(tmp_path, "--records", records) == f"calibrate-dspark: {tmp_path} is no checkpoint: it has no config.json"
    )
    assert says(checkpoint, "--records", records) == f"calibrate-dspark: {records}: No such file or directory"
    assert says(checkpoint, "--prompts", records) == f"calibrate-dspark: {records}: No such file or directory"
    out = tmp_path / "no" / "c.json"
    assert f"{out} cannot be written; name another by --out" in says(checkpoint, "--records", records, "--out", out)
    records.write_text("\n")
    assert f"{records} holds no drafts" in says(checkpoint, "--records", records)
    record(records, Made("f" * 64, 3), 7)
    assert "holds no such drafts of this checkpoint" in (said := says(checkpoint, "--records", records))
    assert "but 7 of 3 tokens on ffffffffffff..." in said
    (tmp_path / "config.json").write_text("{}")
    assert f"{tmp_path} has no confidence head" in says(tmp_path, "--records", records)
    assert main.run(["calibrate-dspark", str(checkpoint), "--draft-sample-method", "best"]) == 2
    assert "Invalid value for '--draft-sample-method': Value error, 'best' is not one of" in capsys.readouterr().err


def test_what_trace_refuses(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("{}")
    both = ("dspark-trace", checkpoint, "--prompts", prompts, "--out", out)
    assert f"{prompts}, line 1: a line is" in refused(capsys, *both)
    content = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    assert f"{prompts}, prompt 1: a trace is of texts alone" in refused(capsys, *both)
    prompts.write_text('{"prompt": "hi"}')
    out.mkdir()
    (out / "old").write_text("")
    assert f"{out} is not empty" in refused(capsys, *both)
    (out / "old").unlink()
    new = ("--prompts", prompts, "--out", tmp_path / "new")
    for folder in (both[2:], new):
        assert "nowhere: No such file or directory" in refused(capsys, "dspark-trace", tmp_path / "nowhere", *folder)
    assert out.is_dir() and not (tmp_path / "new").exists()
    assert main.run(["dspark-trace", str(checkpoint), "--prompts", str(prompts)]) != 0
    assert "Missing option '--out'" in capsys.readouterr().err
