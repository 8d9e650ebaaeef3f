"""Published tensors into parameters, and the one error that lists every mismatch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_vllm.checkpoint.bare import BareModel
from deepinfer_vllm.checkpoint.writer import write_checkpoint
from deepinfer_vllm.models.deepseek_v41 import weights
from deepinfer_vllm.models.deepseek_v41.engram_table import open_tables
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from deepinfer_vllm.models.deepseek_v41.model import DeepseekV41ForCausalLM
from small_model import published

INDEX = "model.safetensors.index.json"
TABLE = "layers.4.engram.embed.weight"
Tensors = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("vllm_layers")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, published(), shards=3)
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> DeepseekV41ForCausalLM:
    """Built and not loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    args = EngineArgs(model=str(directory), dtype="float32", skip_tokenizer_init=True, enforce_eager=True)
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        built = initialize_model(vllm_config=config)
    assert isinstance(built, DeepseekV41ForCausalLM)
    return built


def read(directory: Path) -> Tensors:
    return {name: t for file in sorted(directory.glob("model*.safetensors")) for name, t in load_file(file).items()}


def test_every_parameter_is_filled(model: DeepseekV41ForCausalLM, directory: Path) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    tensors = read(directory)
    assert weights.load(model, tensors.items()) == {name for name, _ in model.named_parameters()}
    assert weights.expected_names(model) == {name for name in tensors if ".engram.embed." not in name}
    assert not any(bool(p.isnan().any()) for p in model.layers.parameters())
    layer = model.layers[2]
    for e in range(8):
        gate, up = layer.ffn.experts.w13[e].chunk(2)
        for part, got in (("w1", gate), ("w3", up), ("w2", layer.ffn.experts.w2[e])):
            assert torch.equal(got, tensors[f"layers.2.ffn.experts.{e}.{part}.weight"])
    for name, got in (
        ("embed.weight", model.embed.weight[:384]),
        ("head.weight", model.head.weight[:384]),
        ("layers.2.hc_attn_fn", layer.hc_attn.fn),
        ("layers.2.hc_ffn_scale", layer.hc_ffn.scale),
        ("layers.2.attn.wo_a.weight", layer.attn.wo_a.weight),
        ("layers.2.attn.indexer.wk.weight", layer.attn.indexer.wk.weight),
        ("layers.2.ffn.gate.bias_vl", layer.ffn.gate.bias_vl),
        (TABLE, model.layers[4].engram.table.rows),
    ):
        assert torch.equal(got, tensors[name]), name


def test_other_modules_of_the_release_are_skipped(model: DeepseekV41ForCausalLM, directory: Path) -> None:
    others = ["mtp.0.main_proj.weight", "vision.norm.weight", "aligner.w1.bias", "image_start", "image_newline"]
    weights.load(model, {**read(directory), **{name: torch.zeros(3) for name in others}}.items())


def test_one_error_lists_everything(model: DeepseekV41ForCausalLM, directory: Path) -> None:
    tensors = read(directory)
    del tensors["norm.weight"], tensors["layers.1.ffn.experts.3.w2.weight"], tensors["layers.0.hc_ffn_base"]
    tensors |= {"layers.0.attn.compressor.wgate.weight": torch.zeros(2, 2), "imagery.weight": torch.zeros(1)}
    wrong = {
        "embed.weight": (384, 1),
        "head.weight": (380, 32),
        "layers.1.attn.wq_a.weight": (12, 31),
        "layers.1.attn.wq_b.weight": (1, 12),
        "layers.2.attn.attn_sink": (1,),
        "layers.2.attn.kv_norm.weight": (1,),
        "layers.3.ffn.experts.0.w1.weight": (16,),
        "layers.3.hc_attn_scale": (1,),
        "layers.4.engram.q_weight": (1, 32),
    }
    with pytest.raises(CheckpointError) as error:
        weights.load(model, (tensors | {name: torch.zeros(shape) for name, shape in wrong.items()}).items())
    message = str(error.value)
    assert "2 unexpected: layers.0.attn.compressor.wgate.weight, imagery.weight;" in message
    assert "3 missing: layers.0.hc_ffn_base, layers.1.ffn.experts.3.w2.weight, norm.weight;" in message
    assert f"{len(wrong)} that do not fit: " in message, message
    for name, shape in wrong.items():
        assert f"{name} ({list(shape)} into [" in message
    assert message.endswith("Check that the config belongs to these files and that no shard is missing")


def test_a_long_list_is_cut(model: DeepseekV41ForCausalLM) -> None:
    with pytest.raises(CheckpointError, match=r"\d{3} missing: embed\.weight, .*, …\. Check") as error:
        weights.load(model, [])
    assert str(error.value).count(".weight") <= 40


def copy(directory: Path, target: Path) -> Path:
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_table_of_another_shape(model: DeepseekV41ForCausalLM, directory: Path, tmp_path: Path) -> None:
    other = published(engram_head_dim=12)
    write_checkpoint(tmp_path, other, shards=2)
    with pytest.raises(CheckpointError) as error:
        open_tables(model.config, tmp_path)
    rows = model.config.engram.num_rows[0]
    for part in ("layers.0.engram.embed.weight", f"shape [{rows}, 12]", f"asks for [{rows}, 8]", "engram_head_dim"):
        assert part in str(error.value)


def test_a_table_in_no_shard(model: DeepseekV41ForCausalLM, directory: Path, tmp_path: Path) -> None:
    index = json.loads((copy(directory, tmp_path) / INDEX).read_text())
    del index["weight_map"][TABLE]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{TABLE} is in no shard of .*Restore the file"):
        open_tables(model.config, tmp_path)


def test_a_missing_shard(directory: Path, tmp_path: Path) -> None:
    """vLLM reads the files that are there; what the other held is missing."""
    names = json.loads((directory / INDEX).read_text())["weight_map"]
    file = next(f for f in sorted(set(names.values())) if not any("engram.embed" in n for n in names if names[n] == f))
    (copy(directory, tmp_path) / file).unlink()
    lost = sorted(name for name, where in names.items() if where == file)
    with pytest.raises(CheckpointError, match=f"{len(lost)} missing: {lost[0]}"):
        BareModel(tmp_path)
