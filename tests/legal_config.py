"""What makes a published V4.1 config legal; used to check what the generators give."""

from __future__ import annotations

from typing import Any


def assert_legal(config: dict[str, Any]) -> None:
    text = config["text_config"]
    layers, ratios = text["num_hidden_layers"], text["compress_ratios"]
    kv, index = text["kv_source_layer_ids"], text["index_source_layer_ids"]
    assert len(ratios) >= layers and set(ratios) <= {0, 1, 2}
    assert kv == sorted(set(kv)) and index == sorted(set(index)) and set(kv) <= set(index)
    assert all(0 <= layer < layers and ratios[layer] for layer in index)
    for layer in range(layers):
        if ratios[layer]:
            source = max(s for s in kv if s <= layer)
            assert ratios[source] == ratios[layer], (layer, source)
    _assert_candidates_legal(text)
    assert text["num_attention_heads"] % text["o_groups"] == 0
    assert text["qk_rope_head_dim"] % 2 == 0
    assert text["qk_rope_head_dim"] <= min(text["head_dim"], text["index_head_dim"])
    assert 1 <= text["num_experts_per_tok"] <= text["n_routed_experts"]
    assert 0 <= text["engram_pad_token_id"] < text["vocab_size"]
    assert text["engram_layer_ids"] == sorted(set(text["engram_layer_ids"]))
    assert all(0 <= layer < layers for layer in text["engram_layer_ids"])
    assert len(text["engram_num_embeddings"]) == len(text["engram_layer_ids"])
    if text["num_nextn_predict_layers"]:
        _assert_draft_legal(text)
    assert config["image_token_id"] < text["vocab_size"]


def _assert_candidates_legal(text: dict[str, Any]) -> None:
    source = text["candidate_source_layer_id"]
    if source < 0:
        return
    index, ratios = text["index_source_layer_ids"], text["compress_ratios"]
    assert source in index
    assert {ratios[layer] for layer in index if layer >= source} == {ratios[source]}
    assert text["candidate_topk_blocks"] > 0 and text["candidate_block_size"] > 0


def _assert_draft_legal(text: dict[str, Any]) -> None:
    targets = text["dspark_target_layer_ids"]
    assert targets and targets == sorted(set(targets))
    assert all(0 <= layer < text["num_hidden_layers"] for layer in targets)
    assert 1 <= text["dspark_num_experts_per_tok"] <= text["dspark_n_routed_experts"]
    assert text["dspark_markov_rank"] > 0 and text["dspark_block_size"] > 0
    assert 0 <= text["dspark_noise_token_id"] < text["vocab_size"]
