"""The scripts for a GPU, with a tiny checkpoint on a CPU; what they measure there is in benchmarks/results/h200/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_vllm.checkpoint.config import TextConfig
from deepinfer_vllm.checkpoint.presets import PRESETS
from deepinfer_vllm.checkpoint.quantise import CONFIG
from deepinfer_vllm.checkpoint.vision import VisionConfig
from deepinfer_vllm.checkpoint.writer import write_checkpoint

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


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, and of enough positions for every script here."""
    directory = tmp_path_factory.mktemp("checkpoint") / "long"
    write_checkpoint(directory, TextConfig(max_position_embeddings=16_384).published("float32"), seed=0, shards=1)
    return directory


def test_the_store_part_by_part(long_checkpoint: Path, tmp_path: Path) -> None:
    """A fresh engine finds what another has stored, as much as the GPU's own cache does; of damaged slabs it takes
    nothing wrong."""
    sizes = [
        *("--tokens", 300, "--tail", 40, "--count", 2, "--batch", 2, "--prompt", 60, "--decode", 8, "--rounds", 1),
        *("--chunk", 256, "--kv-gb", 0.0625, "--host-gb", 0.03125, "--store-gb", 0.125, "--settle", 1, "--answer", 8),
    ]
    for part in ("bare", "fill", "load", "faulty"):
        ran = call(
            "store.py", part, long_checkpoint, tmp_path / "kv", tmp_path, *sizes, DEEPINFER_VLLM_MODEL="portable"
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
    ran = call("store_report.py", tmp_path, "--out", tmp_path / "store.json")
    assert ran.returncode == 0, ran.stderr
    report = json.loads((tmp_path / "store.json").read_text())
    ways = report["ttft"]["300"]
    assert ways["recomputed"]["hits"] == [0, 0] and min(ways["GPU hit"]["hits"]) > 0
    for way in ("recomputed and stored", "store hit", "store hit, damaged"):
        assert ways[way]["same answers"] == ways[way]["of"] == 2, way
    assert ways["store hit"]["same hits"] and max(ways["store hit, damaged"]["hits"]) == 0
    assert json.loads((tmp_path / "faulty.json").read_text())["changed_slabs"] > 0
    assert {*report["decode_s"]} == {"bare", "fill"} and report["gb_per_s"]["load"]["GPU in"] > 0


def test_chunks_of_no_size(tmp_path: Path) -> None:
    ran = call("chunking.py", "5", tmp_path, tmp_path)
    assert ran.returncode == 2 and "5: must be cost, or lie in 68..32768" in ran.stderr


def test_the_kernels_themselves(tmp_path: Path) -> None:
    """In Triton's interpreter; what it says of time there means nothing."""
    pytest.importorskip("triton")
    sizes = ["--heads", 20, "--dim", 32, "--window", 20, "--selected", 40, "--tokens", 3, "--runs", 1]
    ran = call("kernels.py", "--device", "cpu", *sizes, "--out", tmp_path / "kernels.json")
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert found["attention"]["3"]["error"] < 1e-5 > found["gates"]["3"]["error"]
