"""The scripts for a GPU, with a tiny checkpoint on a CPU; what they measure there is in benchmarks/results/h200/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_vllm.checkpoint.presets import PRESETS
from deepinfer_vllm.checkpoint.quantise import CONFIG
from deepinfer_vllm.checkpoint.vision import VisionConfig

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "benchmarks" / "gpu"
TOKENS = ["--tokens", "1", "100", "300"]


def call(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.py")))
def test_help_has_an_example(script: str) -> None:
    done = call(script, "--help")
    assert done.returncode == 0 and f"python benchmarks/gpu/{script}" in done.stdout


def test_our_model_is_near_the_reference_and_compared_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is written as on the GPU, quantised; prompts are longer than a window and than a chunk."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import wide

    config = PRESETS["tiny"].published("bfloat16", VisionConfig()) | {"quantization_config": CONFIG}
    size = wide.write(tmp_path / "tiny", config, "cpu")
    assert size == sum(file.stat().st_size for file in (tmp_path / "tiny").glob("*.safetensors")) - headers(tmp_path)
    arguments = [tmp_path / "tiny", tmp_path / "plain.safetensors", *TOKENS, "--chunk", 256, "--kv-gb", 0.25]
    ran = call("states.py", *arguments, DEEPINFER_VLLM_MODEL="portable")
    assert ran.returncode == 0, ran.stderr[-2000:]
    ran = call("reference_states.py", tmp_path / "tiny", tmp_path / "f64.safetensors", *TOKENS, "--device", "cpu")
    assert ran.returncode == 0, ran.stderr[-2000:]
    ran = call("compare.py", tmp_path, "plain:f64", "plain:absent", "--out", tmp_path / "oracle.json")
    assert ran.returncode == 0 and "plain:absent is left out" in ran.stderr
    (table,) = json.loads((tmp_path / "oracle.json").read_text()).values()
    assert list(table) == ["1", "100", "300"]
    for row in table.values():
        assert len(row["layers"]) == PRESETS["tiny"].num_hidden_layers - 1
        assert 0 < row["layers"][0] < 0.02  # bfloat16 against float64; later, choices of experts and rows differ too
    assert table["1"]["logits"] < 0.1


def headers(tmp_path: Path) -> int:
    """Bytes of the shards that are not tensors'."""
    total = 0
    for file in (tmp_path / "tiny").glob("*.safetensors"):
        total += 8 + int.from_bytes(file.read_bytes()[:8], "little")
    return total


@pytest.mark.parametrize("drafts", [(), ("--drafts",)], ids=["alone", "with drafts"])
def test_a_token_at_a_time_no_answer_moves(tmp_path: Path, drafts: tuple[str, ...]) -> None:
    """As the mode does on a GPU, and here without compiled kernels."""
    flags = ("--lengths", 3, 40, "--tokens", 5, "--kv-mb", 64, "--dtype", "float32", *drafts)
    ran = call("invariance.py", tmp_path / "pair", tmp_path, *flags, DEEPINFER_VLLM_NATIVE="0")
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    [file] = tmp_path.glob("invariance-invariant-tokens-float32*.json")
    record = json.loads(file.read_text())
    assert record["device"] == "cpu" and record["drafts"] == bool(drafts)
    assert len(record["ways"]) == 5
    for row in record["ways"].values():
        assert row["greedy"]["same bits"] == row["seeded"]["same bits"] == 2
