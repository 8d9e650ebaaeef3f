"""Log-probabilities of prompts, which need every row of the model: decoder-side replay must step aside for them."""

import math

import pytest
from tokenizers import Tokenizer

from serving.client import Api, Json

WINDOW = 128  # tokens that replay would keep


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    text = " ".join(f"Line {i}: the quick brown fox jumps over the lazy dog." for i in range(40))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > 3 * WINDOW
    return ids


@pytest.fixture(scope="module")
def rows(api: Api, prompt: list[int]) -> list[Json | None]:
    return api.complete(prompt, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]


def test_every_prompt_token_has_one(rows: list[Json | None], prompt: list[int]) -> None:
    assert len(rows) == len(prompt)
    assert rows[0] is None
    for token, row in zip(prompt[1:], rows[1:], strict=True):
        assert row is not None
        assert math.isfinite(row[str(token)]["logprob"]) and row[str(token)]["logprob"] <= 0


@pytest.mark.parametrize("position", [7, WINDOW + 7, 2 * WINDOW + 50])
def test_they_are_those_of_generation(api: Api, prompt: list[int], rows: list[Json | None], position: int) -> None:
    """The same token, generated after the same prefix, also without replay.

    Logprobs are of the model, before the restriction to this token.
    """
    token, row = prompt[position], rows[position]
    choice = api.complete(prompt[:position], max_tokens=1, allowed_token_ids=[token], logprobs=1, prompt_logprobs=1)
    assert row is not None
    assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(row[str(token)]["logprob"], abs=1e-3)
