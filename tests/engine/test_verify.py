"""`deepinfer checkpoint verify`: every golden directory, through the bare module and the engine, within its limits."""

import json
import shutil
from pathlib import Path

import pytest

from deepinfer_vllm.cli.main import run
from engine.harness import GOLDEN

DIRECTORIES = ["v41-tiny-a", "v41-tiny-b", "v41-tiny-a-fp8"]


@pytest.mark.parametrize("name", DIRECTORIES)
def test_golden_directories(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verify", str(GOLDEN / name)]) == 0
    out = capsys.readouterr().out
    for what in ("bare, float32, plain", "engine, float32, plain", "bare, float32, qat", "engine, float32, qat"):
        assert f"{what}: " in out and "0 outside their limits" in out


@pytest.mark.parametrize("weights", ["bf16", "fp32"])  # the default is packed
def test_a_quantised_checkpoint_widened_at_load(
    weights: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_WEIGHTS", weights)
    assert run(["checkpoint", "verify", str(GOLDEN / "v41-tiny-a-fp8")]) == 0
    assert capsys.readouterr().out.count("0 outside their limits") == 4


@pytest.mark.parametrize("weights", ["packed", "bf16", "fp32"])
def test_a_quantised_checkpoint_in_bfloat16(
    weights: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_WEIGHTS", weights)
    arguments = ["--dtype", "bfloat16", "--numerics", "qat", "--backend", "bare"]
    assert run(["checkpoint", "verify", str(GOLDEN / "v41-tiny-a-fp8"), *arguments]) == 0
    assert "bare, bfloat16, qat" in capsys.readouterr().out


def test_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verify", str(GOLDEN / "v41-tiny-a"), "--dtype", "bfloat16", "--numerics", "qat"]) == 0
    assert "engine, bfloat16, qat" in capsys.readouterr().out


def test_other_weights_are_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "changed"
    shutil.copytree(GOLDEN / "v41-tiny-b", directory)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["hc_sinkhorn_iters"] -= 1
    (directory / "config.json").write_text(json.dumps(config))
    assert run(["checkpoint", "verify", str(directory), "--backend", "bare", "--numerics", "plain"]) == 1
    assert "outside" in capsys.readouterr().out


def test_a_checkpoint_that_does_not_load_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "cut"
    shutil.copytree(GOLDEN / "v41-tiny-b", directory)
    shard = directory / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert run(["checkpoint", "verify", str(directory), "--backend", "bare"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "does not load" in error and "model.safetensors" in error
