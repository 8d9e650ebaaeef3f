"""Engram's table rows: constants and hashes against the reference, golden values and a loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer_vllm.checkpoint import golden
from deepinfer_vllm.models.deepseek_v41.config import ConfigError, EngramConfig
from deepinfer_vllm.models.deepseek_v41.engram_hash import (
    DEAD,
    HashLayout,
    compressed_vocabulary,
    hash_layouts,
    ngram_rows,
    table_primes,
)
from reference import Config
from reference import engram_hash as reference
from small_model import both_configs, generator


@pytest.fixture(scope="module")
def directory() -> Path:
    return Path(__file__).resolve().parent.parent / "golden" / "v41-tiny-a"


def engram_of(config: Config) -> EngramConfig:
    return EngramConfig(
        layer_ids=config.engram_layer_ids,
        num_rows=config.engram_num_embeddings,
        vocab_size=config.engram_vocab_size,
        max_ngram=config.engram_max_ngram_size,
        num_heads=config.engram_n_heads,
        head_dim=config.engram_head_dim,
        pad_token_id=config.engram_pad_token_id,
        compressed_vocab_size=config.engram_compressed_vocab_size,
    )


def history(ids: list[int], span: int, before: int = 0) -> torch.Tensor:
    """[T, span]: the last ids of each token, `before` where there are none."""
    return torch.tensor([[ids[t - s] if s <= t else before for s in range(span)] for t in range(len(ids))])


def test_golden_constants_and_rows(directory: Path) -> None:
    values = golden.read(directory).values["qat"]
    config = Config.read(directory)
    engram, constants = engram_of(config), values.constants
    token_map, classes = compressed_vocabulary(
        Tokenizer.from_file(str(directory / "tokenizer.json")), config.vocab_size
    )
    assert classes == config.engram_compressed_vocab_size
    assert token_map.tolist() == constants["engram.token_map"].tolist()
    layouts = hash_layouts(engram)
    for i, layout in enumerate(layouts):
        assert layout.multipliers.tolist() == constants["engram.multipliers"][i].tolist()
        assert layout.primes.tolist() == constants["engram.primes"][i].tolist()
        assert layout.offsets.tolist() == constants["engram.offsets"][i].flatten().tolist()
    pad, checked = int(token_map[engram.pad_token_id]), 0
    for prompt in values.prompts:
        if prompt.engram_hash_ids is None:
            continue
        ids = token_map[prompt.input_ids].tolist()
        for i, layout in enumerate(layouts):
            rows = ngram_rows(history(ids, engram.max_ngram), torch.arange(len(ids)), pad, layout)
            assert rows.tolist() == prompt.engram_hash_ids[i].tolist()
            checked += 1
    assert checked


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("span", [2, 3, 4])
def test_as_the_reference_for_other_sizes(span: int, heads: int) -> None:
    primes = table_primes(3, 23, span, heads)
    _, theirs = both_configs(
        engram_layer_ids=[0, 3, 4],
        engram_max_ngram_size=span,
        engram_n_heads=heads,
        engram_vocab_size=23,
        engram_num_embeddings=[sum(map(sum, layer)) for layer in primes],
    )
    engram = engram_of(theirs)
    ids = torch.randint(theirs.engram_compressed_vocab_size, (50,), generator=generator(span)).tolist()
    expected = reference.hash_ids(ids, list(range(theirs.engram_compressed_vocab_size)), theirs)
    for layer, layout in zip(engram.layer_ids, hash_layouts(engram), strict=True):
        assert layout.multipliers.tolist() == reference.multipliers(theirs, layer)
        assert layout.primes.tolist() == reference.primes(theirs)[layer]
        # Pad is the id of token 2; whatever stands before the start must not matter.
        rows = ngram_rows(history(ids, span, before=77), torch.arange(50), engram.pad_token_id, layout)
        assert rows.tolist() == expected[layer]
        assert int(rows.min()) >= 0 and int(rows.max()) < int(layout.primes.sum())


def by_loop(ids: list[int], layout: HashLayout, pad: int) -> list[int]:
    """Rows of the last token of ids."""
    dead, mixed, offset, row = ids[-1] == DEAD, 0, 0, []
    mixed = (pad if dead else ids[-1]) * int(layout.multipliers[0])
    for back in range(1, len(layout.multipliers)):
        dead = dead or back >= len(ids) or ids[-1 - back] == DEAD
        mixed ^= (pad if dead else ids[-1 - back]) * int(layout.multipliers[back])
        for prime in layout.primes[back - 1].tolist():
            row.append(mixed % prime + offset)
            offset += prime
    return row


def test_no_ngram_spans_a_dead_token() -> None:
    """From a dead token on, look-back reads pad, even where live tokens stand behind it."""
    ours, _ = both_configs()
    assert ours.engram is not None
    layout, pad = hash_layouts(ours.engram)[0], 9
    ids = [4, 5, DEAD, 6, 7, 8, 9, DEAD, DEAD, 3, 11, DEAD]
    rows = ngram_rows(history(ids, 4), torch.arange(len(ids)), pad, layout)
    assert rows.tolist() == [by_loop(ids[: t + 1], layout, pad) for t in range(len(ids))]
    behind = ngram_rows(history([50, 60, DEAD, 6, 7, 8], 4), torch.arange(6), pad, layout)
    assert behind[3:5].tolist() == rows[3:5].tolist()


def test_rows_that_do_not_match_the_hash_are_an_error() -> None:
    ours, _ = both_configs()
    assert ours.engram is not None
    first, second = ours.engram.num_rows
    with pytest.raises(ConfigError) as error:
        hash_layouts(replace(ours.engram, num_rows=(first, second + 1)))
    for part in (f"engram_num_embeddings={second + 1}", "layer 4", f"addresses {second} rows", "engram_vocab_size"):
        assert part in str(error.value)


def test_ids_past_the_tokenizer_share_a_class(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    exact, classes = compressed_vocabulary(tokenizer, size)
    longer, same = compressed_vocabulary(tokenizer, size + 5)
    assert same == classes and torch.equal(longer[:size], exact) and longer[size:].tolist() == [0] * 5
    assert exact.tolist() == reference.token_map(directory / "tokenizer.json")
