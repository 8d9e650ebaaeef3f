"""`deepinfer checkpoint tiny`: complete, deterministic, alive."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.checkpoint.presets import preset
from deepinfer_vllm.checkpoint.tensors import tensor_specs
from deepinfer_vllm.checkpoint.writer import INDEX, write_checkpoint
from deepinfer_vllm.cli.checkpoint import app
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from legal_config import assert_legal
from reference import load

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    create(directory)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def test_the_same_seed_gives_the_same_bytes_in_another_process(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from deepinfer_vllm.cli.checkpoint import app; app()"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "3"}
    subprocess.run([*command, "tiny", str(tmp_path / "again")], check=True, env=environment, capture_output=True)
    assert contents(tmp_path / "again") == contents(tiny)


def test_another_seed_gives_other_weights(tiny: Path, tmp_path: Path) -> None:
    create(tmp_path, seed=1)
    mine, other = contents(tiny), contents(tmp_path)
    assert mine.keys() == other.keys()
    assert {name for name in mine if mine[name] != other[name]} == {n for n in mine if n.endswith(".safetensors")}


def test_files_and_index(tiny: Path) -> None:
    index = json.loads((tiny / INDEX).read_text())
    shards = sorted({*index["weight_map"].values()})
    assert shards == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    json_files = ["config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json"]
    assert sorted(contents(tiny)) == sorted([*shards, *json_files])
    found = {}
    for shard in shards:
        with safe_open(tiny / shard, "pt") as file:
            found.update(dict.fromkeys(file.keys(), shard))
    assert found == index["weight_map"]
    sizes = [(tiny / shard).stat().st_size for shard in shards]
    assert min(sizes) > 0.3 * max(sizes)
    assert 0 < sum(sizes) - index["metadata"]["total_size"] < 0.05 * sum(sizes)


@pytest.mark.parametrize("name", ["v41-tiny-a", "v41-tiny-b"])
def test_names_shapes_and_types_are_the_published_ones(name: str, tmp_path: Path) -> None:
    """The golden checkpoints have the published names; writing their config must give the same set."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    specs = {spec.name: (spec.shape, spec.is_float32) for spec in tensor_specs(config)}
    golden = load_file(GOLDEN / name / "model.safetensors")
    assert specs == {k: (tuple(v.shape), v.dtype.itemsize == 4) for k, v in golden.items()}
    write_checkpoint(tmp_path, config)
    written: dict[str, str] = {}
    for shard in tmp_path.glob("*.safetensors"):
        written.update({k: str(v.dtype) for k, v in load_file(shard).items()})
    assert written == {k: str(v.dtype) for k, v in golden.items()}


def test_config_is_legal_and_has_the_golden_form(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    assert_legal(config)
    golden = json.loads((GOLDEN / "v41-tiny-a" / "config.json").read_text())
    assert config.keys() == golden.keys()
    assert config["text_config"].keys() == golden["text_config"].keys()
    assert config["text_config"]["max_position_embeddings"] >= 4096


@pytest.mark.parametrize("layers", [4, 5, 6, 8, 12, 40])
def test_other_depths_are_legal(layers: int) -> None:
    config = preset("tiny", layers).published()
    assert_legal(config)
    assert config["text_config"]["num_hidden_layers"] == layers
    assert set(config["text_config"]["compress_ratios"]) == {0, 1, 2}


def test_mid_is_legal_and_as_large_as_it_says() -> None:
    config = preset("mid").published()
    assert_legal(config)
    text = config["text_config"]
    sizes = {spec.name: math.prod(spec.shape) for spec in tensor_specs(config)}
    read_by_row = {name for name in sizes if name == "embed.weight" or ".engram.embed." in name}
    routed = {name for name in sizes if ".experts." in name}
    share = text["num_experts_per_tok"] / text["n_routed_experts"]
    active = sum(n * (share if name in routed else 1) for name, n in sizes.items() if name not in read_by_row)
    assert 1.1e9 < sum(sizes.values()) < 1.3e9 and 0.27e9 < active < 0.33e9
    source, layers = text["candidate_source_layer_id"], text["num_hidden_layers"]
    assert source == max(text["kv_source_layer_ids"]) == layers // 2
    assert text["candidate_topk_blocks"] * text["candidate_block_size"] < text["max_position_embeddings"]


def test_progress_ends_at_the_number_of_parameters(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    made = create(tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(set(told)) and {total for _, total in told} == {made.parameters}
    assert told[-1][0] == made.parameters and len(told) > 100


def test_greedy_answers_are_not_degenerate(tiny: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer, reference = Tokenizer.from_file(str(tiny / "tokenizer.json")), load(tiny)
    for text in ("Hello! What is the capital of France?", '{"name": "get_time"}', "aaaaaaaaaaaaaaaaaaaaaaaa"):
        ids = [0, *tokenizer.encode(text).ids]
        assert 3 < float(reference.forward(ids).logits.std()) < 5
        assert len(set(reference.greedy(ids, 24))) >= 10


def test_layers_shards_and_dtype(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tiny", str(tmp_path), "--layers", "5", "--shards", "3", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "float32" and config["text_config"]["num_hidden_layers"] == 5
    load(tmp_path).forward([0, 5, 6])


VISION_NAMES = {
    "vision.patch_embed.proj.weight": (32, 588),
    "vision.patch_embed.proj.bias": (32,),
    "vision.blocks.1.norm1.weight": (32,),
    "vision.blocks.1.norm2.weight": (32,),
    "vision.blocks.1.attn.wqkv.weight": (96, 32),
    "vision.blocks.1.attn.wqkv.bias": (96,),
    "vision.blocks.1.attn.wo.weight": (32, 32),
    "vision.blocks.1.attn.wo.bias": (32,),
    "vision.blocks.1.mlp.w1.weight": (96, 32),
    "vision.blocks.1.mlp.w2.weight": (32, 48),
    "vision.norm.weight": (32,),
    "aligner.w1.weight": (128, 288),
    "aligner.w1.bias": (128,),
    "aligner.w2.weight": (128, 128),
    "aligner.w2.bias": (128,),
    "image_start": (128,),
    "image_end": (128,),
    "image_newline": (128,),
}


def test_vision_adds_its_tensors_and_moves_no_other(tiny: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tiny", str(tmp_path), "--vision"])
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "config.json").read_text())
    assert_legal(config)
    text = json.loads((tiny / "config.json").read_text())
    assert {key for key in config if config[key] != text[key]} == {"vision_config"}
    before, after = ({k: v for f in d.glob("*.safetensors") for k, v in load_file(f).items()} for d in (tiny, tmp_path))
    added = {name: tensor for name, tensor in after.items() if name not in before}
    per_block = {name.replace(".1.", ".0.") for name in VISION_NAMES if ".1." in name}
    assert added.keys() == VISION_NAMES.keys() | per_block
    assert {name: tuple(added[name].shape) for name in VISION_NAMES} == VISION_NAMES
    assert {name for name, tensor in added.items() if tensor.dtype.itemsize == 4} == {
        "image_start",
        "image_newline",
        "image_end",
    }
    assert all(before[name].equal(after[name]) for name in before)


def test_force_leaves_no_shards_of_another_count(tmp_path: Path) -> None:
    create(tmp_path, shards=3)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="--force"):
        create(tmp_path)
    create(tmp_path, force=True)
    assert len(list(tmp_path.glob("model*.safetensors"))) == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "unknown preset 'huge': choose from tiny"),
        (["--layers", "2"], "2 layers are too few"),
        (["--shards", "0"], "0 shards are too few"),
        (["--dtype", "fp7"], "unknown dtype 'fp7'"),
        (["--seed", "-1"], "seed -1 is negative"),
    ],
)
def test_bad_options_are_one_line_and_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tiny", str(tmp_path / "new"), *arguments])
    assert result.exit_code == 2 and message in result.stderr
    assert len(result.stderr.splitlines()) == 1 and "Traceback" not in result.output


def test_bad_options_leave_what_force_would_replace(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "copy")
    for option in (["--shards", "0"], ["--dtype", "fp7"], ["--layers", "2"]):
        result = CliRunner().invoke(app, ["tiny", str(tmp_path / "copy"), "--force", *option])
        assert result.exit_code == 2 and contents(tmp_path / "copy") == contents(tiny)


def test_bad_directories_are_one_line_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "file", tmp_path / "file" / "below"):
        result = CliRunner().invoke(app, ["tiny", str(target)])
        assert result.exit_code == 2 and str(tmp_path) in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_weights_may_be_read_by_whoever_may_read_the_config(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        create(tmp_path / "tiny")
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in (tmp_path / "tiny").iterdir()} == dict.fromkeys(
        contents(tmp_path / "tiny"), "0o640"
    )


def test_a_file_that_cannot_be_written_is_one_line_and_code_2(tmp_path: Path) -> None:
    """A size limit stands for a full disk."""
    command = 'ulimit -f 64; trap "" XFSZ; exec "$0" -c "from deepinfer_vllm.cli.main import main; main()" "$@"'
    arguments = [sys.executable, "checkpoint", "tiny", str(tmp_path / "new")]
    done = subprocess.run(["bash", "-c", command, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "model-00001-of-00002.safetensors cannot be written: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_has_examples() -> None:
    for command in ("tiny", "verify"):
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0 and "Example: deepinfer checkpoint" in result.output


def test_the_command_module_imports_nothing_heavy() -> None:
    code = (
        "import sys, deepinfer_vllm.cli.checkpoint;"
        "print({'torch', 'vllm', 'safetensors', 'tokenizers', 'numpy'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "set()"
