"""`--tokenizer-mode deepseek_v41`: conversations become V4.1's own prompts, and special tokens are single ids."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from serving.client import NO_THINKING, Api, Json, user

BOS, USER, ASSISTANT, SYSTEM = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def prompt(api: Api, tokenizer: Tokenizer, messages: list[Json], **body: Any) -> str:
    """The prompt that the server makes of a conversation, as text."""
    tokens = api.post("/tokenize", messages=messages, **body)["tokens"]
    return tokenizer.decode(tokens, skip_special_tokens=False)


def test_without_thinking(api: Api, tokenizer: Tokenizer) -> None:
    text = prompt(api, tokenizer, [user("Hello")], chat_template_kwargs=NO_THINKING)
    assert text == f"{BOS}{USER}Hello{ASSISTANT}</think>"


def test_system_text_without_thinking(api: Api, tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("Hello")]
    text = prompt(api, tokenizer, messages, chat_template_kwargs=NO_THINKING)
    assert text == f"{BOS}{SYSTEM}Be brief.{USER}Hello{ASSISTANT}</think>"


@pytest.mark.parametrize(("effort", "number"), [(None, 75), ("low", 50), ("max", 100), (33, 33)])
def test_thinking_names_its_effort(api: Api, tokenizer: Tokenizer, effort: str | int | None, number: int) -> None:
    kwargs = {} if effort is None else {"chat_template_kwargs": {"reasoning_effort": effort}}
    text = prompt(api, tokenizer, [user("Hello")], **kwargs)
    assert text.startswith(f"{BOS}{SYSTEM}Reasoning Effort: {number} (range 1-100, ")
    assert text.endswith(f"{USER}Hello{ASSISTANT}<think>")


def test_special_tokens_are_single_ids(api: Api, tokenizer: Tokenizer) -> None:
    tokens = api.post("/tokenize", messages=[user("Hello")], chat_template_kwargs=NO_THINKING)["tokens"]
    ends = [tokenizer.token_to_id(name) for name in (BOS, USER, ASSISTANT, "</think>")]
    assert [*tokens[:2], *tokens[-2:]] == ends


def test_tool_results_stand_in_the_users_turn(api: Api, tokenizer: Tokenizer) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        user("Add."),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "42"},
    ]
    text = prompt(api, tokenizer, messages, tools=[TOOL], chat_template_kwargs=NO_THINKING)
    assert '{"name": "add"' in text
    assert '<｜DSML｜ invoke name="add">' in text
    assert text.endswith(f"{USER}<tool_result>42</tool_result>{ASSISTANT}</think>")
