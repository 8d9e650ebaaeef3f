"""`--reasoning-parser deepseek_v41`: what stands before </think> is reasoning, what follows is the answer."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from serving.client import Api, user

END = "</think>"


@pytest.fixture
def thought(tokenizer: Tokenizer) -> dict[str, Any]:
    """A request whose answer, drawn from a few tokens of which one is </think>, ends its reasoning early."""
    words = tokenizer.encode(" the water and you", add_special_tokens=False).ids
    allowed = [*words, tokenizer.token_to_id(END)]
    return {
        "messages": [user("Think, then answer.")],
        "max_tokens": 40,
        "temperature": 1,
        "seed": 7,
        "allowed_token_ids": allowed,
        "return_token_ids": True,
    }


def test_reasoning_is_separated(api: Api, tokenizer: Tokenizer, thought: dict[str, Any]) -> None:
    answer = api.post("/v1/chat/completions", **thought)
    choice, usage = answer["choices"][0], answer["usage"]
    raw = tokenizer.decode(choice["token_ids"], skip_special_tokens=False)
    reasoning, found, content = raw.partition(END)
    assert found, f"the model never closed its reasoning: {raw!r}"
    assert choice["message"]["reasoning"] == reasoning != ""
    assert choice["message"]["content"] == content.replace(END, "") != ""
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(tokenizer.encode(reasoning).ids)


def test_streamed_reasoning_is_separated(api: Api, thought: dict[str, Any]) -> None:
    whole = api.post("/v1/chat/completions", **thought)["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in api.events("/v1/chat/completions", **thought)]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == whole["reasoning"]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]


@pytest.mark.parametrize("off", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"thinking": False}}])
def test_thinking_switched_off_gives_an_answer_only(api: Api, off: dict[str, Any]) -> None:
    message = api.post("/v1/chat/completions", messages=[user("Hello")], max_tokens=8, **off)["choices"][0]["message"]
    assert message["reasoning"] is None
    assert message["content"]


def test_grammar_waits_for_the_end_of_reasoning(api: Api, tokenizer: Tokenizer) -> None:
    """A bias closes the reasoning at once; from there on, the grammar holds."""
    choice = api.post(
        "/v1/chat/completions",
        messages=[user("Pick a number.")],
        max_tokens=20,
        logit_bias={str(tokenizer.token_to_id(END)): 100},
        structured_outputs={"regex": "[0-9]{4}"},
        return_token_ids=True,
    )["choices"][0]
    assert choice["token_ids"][0] == tokenizer.token_to_id(END)
    assert len(choice["message"]["content"]) == 4 and choice["message"]["content"].isdecimal()
