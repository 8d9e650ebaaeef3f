"""The tokenizer of small checkpoints: V4.1's special tokens, exact round trips, the vocabulary asked for."""

from __future__ import annotations

import pytest

from deepinfer_vllm.checkpoint.special_tokens import BOS, EOS, IMAGE, NAMED, PAD
from deepinfer_vllm.checkpoint.tokenizer import SMALLEST_VOCABULARY, build_tokenizer
from deepinfer_vllm.models.deepseek_v41.engram_hash import compressed_vocabulary, table_primes
from deepinfer_vllm.models.deepseek_v41.errors import CheckpointError
from reference import engram_hash


@pytest.mark.parametrize("vocab_size", [SMALLEST_VOCABULARY, 397, 512, 1024, 4096])
def test_ids_fill_the_vocabulary(vocab_size: int) -> None:
    tokenizer = build_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    assert [tokenizer.token_to_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    assert tokenizer.token_to_id(IMAGE) == vocab_size - 5


@pytest.mark.parametrize("token", [*NAMED, BOS, EOS, PAD, IMAGE])
def test_special_tokens_are_single_and_found_in_text(token: str) -> None:
    tokenizer = build_tokenizer(1024)
    ids = tokenizer.encode(f"one{token}two").ids
    assert tokenizer.token_to_id(token) in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"one{token}two"


@pytest.mark.parametrize("token", ["<think>", "</think>", "｜DSML｜"])
def test_what_parsers_look_for_survives_decoding(token: str) -> None:
    tokenizer = build_tokenizer(1024)
    assert tokenizer.decode(tokenizer.encode(token).ids, skip_special_tokens=True) == token


@pytest.mark.parametrize(
    "text",
    [
        "The model reads a question, and then it writes an answer.",
        '{"name": "get_weather", "arguments": {"location": "Paris", "days": 3}}',
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        " leading,  double   spaces\tand\r\nline ends \n\n",
        "naïve café — 你好，мир 🙂 \u0301\u200b\x00\x7f",
        "",
    ],
)
def test_round_trip(text: str) -> None:
    tokenizer = build_tokenizer(1024)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_english_and_json_take_few_tokens() -> None:
    tokenizer = build_tokenizer(1024)
    for text in ("What is the answer to the second question?", '{"type": "object", "properties": {"name": "x"}}'):
        assert len(tokenizer.encode(text).ids) < 0.45 * len(text)


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(CheckpointError, match="too small"):
        build_tokenizer(SMALLEST_VOCABULARY - 1)


def test_engram_sizes_agree_with_the_reference(tmp_path: object) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    tokenizer = build_tokenizer(1024)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids, classes = compressed_vocabulary(tokenizer, 1024)
    assert ids.tolist() == engram_hash.token_map(tmp_path / "tokenizer.json")
    assert classes == max(ids.tolist()) + 1 < 1024  # some tokens do fall together


def test_table_rows_of_the_golden_checkpoint_and_the_release() -> None:
    def rows(*sizes: int) -> list[int]:
        return [sum(map(sum, layer)) for layer in table_primes(*sizes)]

    assert rows(2, 64, 4, 2) == [462, 630]
    assert rows(2, 16_000_000, 4, 8) == [384_006_168, 384_016_682]
