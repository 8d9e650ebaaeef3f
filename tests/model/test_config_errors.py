"""Every config that no model can be built from: one error that names field, value, limit and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_vllm.models.deepseek_v41.config import ConfigError, ModelConfig
from deepinfer_vllm.models.deepseek_v41.topology import check
from small_model import hf_config

NEEDED = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank "
    "o_groups rms_norm_eps sliding_window max_position_embeddings hc_mult hc_sinkhorn_iters hc_eps n_routed_experts "
    "num_experts_per_tok moe_intermediate_size engram_num_embeddings engram_vocab_size engram_max_ngram_size "
    "engram_n_heads engram_head_dim engram_compressed_vocab_size"
)
POSITIVE = (
    "num_hidden_layers vocab_size hidden_size q_lora_rank o_lora_rank sliding_window hc_mult hc_sinkhorn_iters "
    "n_routed_experts moe_intermediate_size index_n_heads index_head_dim index_topk engram_n_heads engram_head_dim "
    "engram_vocab_size engram_compressed_vocab_size candidate_block_size"
)
ILLEGAL: list[tuple[dict[str, Any], str, str]] = [
    # fields, what the message says of field and value, and of the limit
    ({"num_attention_heads": 5}, "num_attention_heads=5", "multiple of o_groups=2"),
    ({"num_attention_heads": 0}, "num_attention_heads=0", "positive multiple of o_groups=2"),
    ({"o_groups": 0}, "num_attention_heads=4", "multiple of o_groups=0"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7", "multiple of 2"),
    ({"qk_rope_head_dim": 0}, "qk_rope_head_dim=0", "positive multiple of 2"),
    ({"qk_rope_head_dim": 18}, "qk_rope_head_dim=18", "must not exceed head_dim=16"),
    *(({field: 0}, f"{field}=0", "at least 1") for field in POSITIVE.split()),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok=9", "1..n_routed_experts=8"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok=0", "1..n_routed_experts=8"),
    ({"scoring_func": "relu"}, "scoring_func='relu'", "sqrtsoftplus, sigmoid or softmax"),
    ({"compress_ratios": [0, 4, 1, 1, 1]}, "compress_ratios[1]=4", "0 (window only), 1 or 2"),
    ({"compress_ratios": [0, -1, 1, 1, 1]}, "compress_ratios[1]=-1", "0 (window only), 1 or 2"),
    ({"compress_ratios": [1, 2, 1, 1, 1]}, "compress_ratios[0]=1", "a source in kv_source_layer_ids=[1, 2]"),
    ({"kv_source_layer_ids": [2]}, "compress_ratios[1]=2", "a source in kv_source_layer_ids=[2]"),
    ({"kv_source_layer_ids": []}, "compress_ratios[1]=2", "a source in kv_source_layer_ids=[]"),
    ({"index_source_layer_ids": [2, 3]}, "compress_ratios[1]=2", "a source in index_source_layer_ids=[2, 3]"),
    ({"compress_ratios": [0, 2, 1, 2, 1]}, "compress_ratios[3]=2", "ratio of its KV source, layer 2: 1"),
    ({"kv_source_layer_ids": [1, 2, 5]}, "kv_source_layer_ids=5", "0..num_hidden_layers-1=4"),
    ({"kv_source_layer_ids": [-1, 1, 2]}, "kv_source_layer_ids=-1", "0..num_hidden_layers-1=4"),
    ({"index_source_layer_ids": [1, 2, 7]}, "index_source_layer_ids=7", "0..num_hidden_layers-1=4"),
    ({"index_source_layer_ids": [0, 1, 2]}, "index_source_layer_ids=0", "its ratio is 0"),
    ({"kv_source_layer_ids": [0, 1, 2]}, "kv_source_layer_ids=0", "its ratio is 0"),
    ({"kv_source_layer_ids": [1, 2, 4]}, "kv_source_layer_ids=4", "must stand in index_source_layer_ids too"),
    ({"index_head_dim": 6}, "index_head_dim=6", "at least qk_rope_head_dim=8"),
    ({"candidate_source_layer_id": 4}, "candidate_source_layer_id=4", "one of index_source_layer_ids=[1, 2, 3]"),
    ({"candidate_topk_blocks": -2}, "candidate_topk_blocks=-2", "at least 1"),
    ({"candidate_source_layer_id": 1}, "candidate_source_layer_id=1", "index source 2 of ratio 1"),
    ({"engram_num_embeddings": [500]}, "engram_num_embeddings=[500]", "each of engram_layer_ids=[0, 4]"),
    ({"engram_layer_ids": [0, 5]}, "engram_layer_ids=5", "0..4"),
    ({"engram_max_ngram_size": 1}, "engram_max_ngram_size=1", "at least 2"),
    ({"engram_pad_token_id": 384}, "engram_pad_token_id=384", "0..383"),
    ({"engram_pad_token_id": -1}, "engram_pad_token_id=-1", "0..383"),
]


def error_of(**changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check(ModelConfig.from_hf(hf_config(**changes)))
    message = str(error.value)
    assert message.startswith("DeepSeek-V4.1 config: ")
    assert any(verb in message for verb in ("Correct", "Add", "Make", "Move")) and message.endswith("."), message
    return message


def test_the_small_model_is_legal() -> None:
    check(ModelConfig.from_hf(hf_config()))


@pytest.mark.parametrize("changes, field, limit", ILLEGAL, ids=[str(changes) for changes, _, _ in ILLEGAL])
def test_illegal(changes: dict[str, Any], field: str, limit: str) -> None:
    message = error_of(**changes)
    assert f" {field}: " in message and limit in message, message


VISION = [
    ({"hidden_size": 36}, "vision_config.hidden_size=36", "multiple of 4 * num_attention_heads=8"),
    ({"num_attention_heads": 0}, "vision_config.num_attention_heads=0", "at least 1"),
    ({"downsample_ratio": 1}, "vision_config.downsample_ratio=1", "at least 2"),
    ({"max_image_tokens": 3}, "vision_config.max_image_tokens=3", "at least 4"),
    ({"patch_size": 0}, "vision_config.patch_size=0", "at least 1"),
    ({"num_hidden_layers": -1}, "vision_config.num_hidden_layers=-1", "at least 1"),
    ({"min_pixels": -1}, "vision_config.min_pixels=-1", "at least 0"),
]


@pytest.mark.parametrize("changes, field, limit", VISION, ids=[str(changes) for changes, _, _ in VISION])
def test_illegal_vision(changes: dict[str, Any], field: str, limit: str) -> None:
    message = error_of(vision=changes)
    assert f" {field}: " in message and limit in message, message


def test_vision_is_there_when_the_tower_has_layers() -> None:
    config = ModelConfig.from_hf(hf_config(vision={}))
    check(config)
    assert config.vision is not None and (config.vision.num_layers, config.vision.dim) == (2, 32)
    assert ModelConfig.from_hf(hf_config(vision={"num_hidden_layers": 0})).vision is None
    assert ModelConfig.from_hf(hf_config()).vision is None


@pytest.mark.parametrize("image", [384, -1])
def test_an_image_id_outside_the_vocabulary(image: int) -> None:
    hf = hf_config(vision={})
    hf.image_token_id = image
    with pytest.raises(ConfigError, match=f"image_token_id={image}: must lie in 0..383"):
        check(ModelConfig.from_hf(hf))


def test_vision_without_an_image_id() -> None:
    hf = hf_config(vision={})
    hf.image_token_id = None
    with pytest.raises(ConfigError, match="image_token_id=None: the field is required"):
        ModelConfig.from_hf(hf)


@pytest.mark.parametrize("field", NEEDED.split())
def test_missing(field: str) -> None:
    message = error_of(**{field: None})
    assert f" {field}=None: the field is required" in message and "text_config in config.json" in message


@pytest.mark.parametrize("field", ["factor", "original_max_position_embeddings"])
def test_yarn_without_its_numbers(field: str) -> None:
    scaling = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    message = error_of(rope_scaling={k: v for k, v in scaling.items() if k != field})
    assert f" rope_scaling.{field}=None: " in message


def test_a_rope_that_is_neither_plain_nor_yarn() -> None:
    assert " rope_scaling.rope_type='linear': " in error_of(rope_scaling={"rope_type": "linear", "factor": 4})


@pytest.mark.parametrize("kind", ["yarn", "deepseek_yarn"])
def test_yarn_by_either_name_flat_or_nested(kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 4, "original_max_position_embeddings": 64}
    for given in (scaling, {"main": {"rope_type": "default"}, "compress": scaling}):
        config = ModelConfig.from_hf(hf_config(rope_scaling=given))
        assert (config.compress_rope.factor, config.compress_rope.original_max_positions) == (4, 64)
        assert config.main_rope.factor == 1 and config.compress_rope.theta == 160000


@pytest.mark.parametrize("ratios, expected", [(None, (0,) * 5), ([0, 2], (0, 2, 0, 0, 0)), ([0] * 8, (0,) * 5)])
def test_ratios_are_filled_and_cut_to_the_layers(ratios: list[int] | None, expected: tuple[int, ...]) -> None:
    config = ModelConfig.from_hf(hf_config(compress_ratios=ratios))
    assert config.compress_ratios == expected


def test_what_may_be_absent() -> None:
    absent = dict.fromkeys(
        (
            "engram_layer_ids",
            "swiglu_limit",
            "scoring_func",
            "topk_method",
            "routed_scaling_factor",
            "norm_topk_prob",
            "candidate_source_layer_id",
            "candidate_topk_blocks",
            "candidate_block_size",
            "rope_scaling",
        )
    )
    config = ModelConfig.from_hf(hf_config(**absent))
    check(config)
    assert config.engram is None and not config.has_gate_bias and config.candidate_source == -1
    assert config.gate_temp == 1 and config.routed_scaling_factor == 1 and config.compress_rope.factor == 1
    assert config.swiglu_limit == 0 and config.scoring_func == "sqrtsoftplus" and config.norm_topk_prob
