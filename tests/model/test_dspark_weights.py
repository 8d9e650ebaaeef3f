"""The draft layers' tensors, their config, and what is said when either does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bare_draft import build
from deepinfer_vllm.checkpoint.create import create
from deepinfer_vllm.models.deepseek_v41 import weights
from deepinfer_vllm.models.deepseek_v41.config import ConfigError
from deepinfer_vllm.models.deepseek_v41.dspark import DSparkV41DraftModel
from deepinfer_vllm.models.deepseek_v41.dspark_config import DraftConfig
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from small_model import hf_config
from topologies import bare_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    create(path, layers=4, shards=4, dtype="float32")
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Iterator[DSparkV41DraftModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_VLLM_MODEL", "portable")
        with bare_model(directory) as target:
            yield build(target)


@pytest.fixture
def tensors(directory: Path) -> Tensors:
    return {name: t for file in sorted(directory.glob("model*.safetensors")) for name, t in load_file(file).items()}


def test_every_parameter_is_filled(model: Any, tensors: Tensors) -> None:
    block = model.model
    for parameter in block.parameters():
        parameter.data.fill_(torch.nan)
    assert model.load_weights(tensors.items()) == {f"model.{name}" for name, _ in block.named_parameters()}
    assert weights.expected_names(block) == {name for name in tensors if name.startswith("mtp.")}
    assert not any(bool(p.isnan().any()) for p in block.parameters())
    first, last = block.mtp[0], block.mtp[2]
    for name, got in (
        ("mtp.0.main_norm.weight", first.main_norm.weight),
        ("mtp.1.hc_ffn_fn", block.mtp[1].hc_ffn.fn),
        ("mtp.2.ffn.experts.3.w2.weight", last.ffn.experts.w2[3]),
        ("mtp.2.norm.weight", last.norm.weight),
        ("mtp.2.markov_head.embed.weight", last.markov_head.embed.weight),
        ("mtp.2.confidence_head.proj.weight", last.confidence_head.proj.weight),
    ):
        assert torch.equal(got, tensors[name]), name
    assert last.ffn.experts.w2.shape[0] == 4 and first.ffn.gate.k == 2  # of the target's 8 and 2


def test_the_published_names(tensors: Tensors) -> None:
    layer = {name.removeprefix("layers.0.") for name in tensors if name.startswith("layers.0.")}
    layer = {name for name in layer if not name.startswith("ffn.experts.")}
    layer |= {f"ffn.experts.{e}.{w}.weight" for e in range(4) for w in ("w1", "w2", "w3")}
    heads = {"norm.weight", "markov_head.embed.weight", "markov_head.head.weight", "confidence_head.proj.weight"}
    expected = {f"mtp.{k}.{name}" for k in range(3) for name in layer}
    expected |= {"mtp.0.main_proj.weight", "mtp.0.main_norm.weight", *(f"mtp.2.{name}" for name in heads)}
    assert {name for name in tensors if name.startswith("mtp.")} == expected


def test_only_shards_with_draft_tensors_are_read(model: Any) -> None:
    assert model.is_unused_checkpoint_weight("layers.0.attn.wkv.weight")
    assert not model.is_unused_checkpoint_weight("mtp.0.attn.wkv.weight")


def test_one_error_lists_everything(model: Any, tensors: Tensors) -> None:
    del tensors["mtp.0.main_proj.weight"], tensors["mtp.1.ffn.experts.0.w1.weight"], tensors["mtp.1.hc_attn_base"]
    tensors |= {"mtp.0.norm.weight": torch.zeros(3), "mtp.3.attn_norm.weight": torch.zeros(3)}
    tensors |= {"mtp.2.markov_head.embed.weight": torch.zeros(1, 32), "mtp.1.attn.kv_norm.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError) as error:
        model.load_weights(tensors.items())
    message = str(error.value)
    assert "2 unexpected: mtp.0.norm.weight, mtp.3.attn_norm.weight;" in message
    assert "3 missing: mtp.0.main_proj.weight, mtp.1.ffn.experts.0.w1.weight, mtp.1.hc_attn_base;" in message
    assert "2 that do not fit: " in message
    assert "mtp.2.markov_head.embed.weight ([1, 32] into [1024, 32])" in message


def test_a_checkpoint_without_confidence_head(directory: Path, tensors: Tensors, tmp_path: Path) -> None:
    """Where the config says so: the head is neither built nor asked for."""
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["enable_confidence_head"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    del tensors["mtp.2.confidence_head.proj.weight"]
    with bare_model(tmp_path) as target:
        without = build(target)
    assert without.model.confidence_head is None
    without.load_weights(tensors.items())


DRAFT = {"num_nextn_predict_layers": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0: DSpark needs at least one draft layer"),
        ({"num_nextn_predict_layers": None}, "num_nextn_predict_layers=0"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids=[]: must be layers of 0..num_hidden_layers-1=4"),
        ({"dspark_target_layer_ids": [2, 5]}, "dspark_target_layer_ids=[2, 5]"),
        ({"dspark_target_layer_ids": [3, 2]}, "in ascending order"),
        ({"dspark_target_layer_ids": [2, 2]}, "dspark_target_layer_ids=[2, 2]"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank=0: must be at least 1"),
        ({"dspark_noise_token_id": 384}, "dspark_noise_token_id=384: must lie in 0..383"),
        ({"dspark_noise_token_id": None}, "dspark_noise_token_id=None"),
        ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok=5: must lie in 1..dspark_n_routed_experts=4"),
        ({"draft_vocab_size": 100}, "draft_vocab_size=100: must be vocab_size=384"),
        ({"o_groups": 0}, "num_attention_heads=4"),
    ],
)
def test_a_config_that_fits_no_draft_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        DraftConfig.from_hf(hf_config(**{**DRAFT, **changes}))
    assert message in str(error.value)


def test_expert_numbers_of_its_own_or_the_targets() -> None:
    own = DraftConfig.from_hf(hf_config(**DRAFT)).model
    assert (own.num_experts, own.num_experts_per_token) == (4, 2)
    absent = {"dspark_n_routed_experts": None, "dspark_num_experts_per_tok": 0}
    same = DraftConfig.from_hf(hf_config(**DRAFT, **absent)).model
    assert (same.num_experts, same.num_experts_per_token) == (8, 2)
