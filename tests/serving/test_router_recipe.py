"""Bodies that the router's entry has encoded with recipe: engines answer them as chats, from recipe's tokens."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest
from tokenizers import Tokenizer

from deepinfer_router.entry import Entry
from deepinfer_router.entry_config import EntryConfig
from deepinfer_router.recipe_config import RecipeConfig
from serving.client import MODEL, NO_THINKING, Api, Json, user
from serving.test_tools import CALL_GRAMMAR, WEATHER

SHORT = {"model": MODEL, "temperature": 0, "max_tokens": 12}
QUESTION = [
    user("The model reads a question, and then"),
    {"role": "assistant", "content": "it writes"},
    user("an answer."),
]
LOOSE = {"type": "function", "function": {"name": "add", "description": "Adds."}}


@dataclass
class Received:
    """A request without a connection."""

    route: bytes
    body: bytes
    method: bytes = b"POST"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    received_at: float = 0.0


Encode = Callable[[str, Json], tuple[Json, list[int]]]


@pytest.fixture(scope="module")
def encode(checkpoint: Path) -> Encode:
    """From a body to the body that the engine is sent, and the prompt's tokens."""

    def run(path: str, fields: Json) -> tuple[Json, list[int]]:
        async def prepare() -> tuple[Json, list[int]]:
            entry = Entry(EntryConfig(encoding="recipe", recipe=RecipeConfig(tokenizer=checkpoint)))
            request = entry.read(Received(path.encode(), orjson.dumps({**SHORT, **fields})))
            await entry.prepare(request)
            await entry.close()
            assert request.token_ids
            return orjson.loads(request.body()), request.token_ids

        return asyncio.run(prepare())

    return run


def post(api: Api, path: str, body: Json) -> Json:
    return api.post(path, **body)


@pytest.mark.parametrize("thinking", [False, True])
def test_chat_is_answered_as_before(api: Api, encode: Encode, thinking: bool) -> None:
    """Where both encoders agree nothing changes but who encodes."""
    fields = {"messages": QUESTION, "chat_template_kwargs": {"thinking": thinking}}
    body, ids = encode("/v1/chat/completions", fields)
    ours, theirs = (post(api, "/v1/chat/completions", one) for one in (body, {**SHORT, **fields}))
    assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"] == len(ids)
    assert ours["choices"][0]["message"] == theirs["choices"][0]["message"]
    assert bool(ours["choices"][0]["message"].get("reasoning")) == thinking


def test_deepseeks_own_word_for_not_thinking_reaches_the_parser(api: Api, encode: Encode) -> None:
    body, _ = encode("/v1/chat/completions", {"messages": QUESTION, "thinking": {"type": "disabled"}})
    message = post(api, "/v1/chat/completions", body)["choices"][0]["message"]
    assert message["content"] and not message.get("reasoning")


def test_streams(api: Api, encode: Encode) -> None:
    fields = {"messages": QUESTION, "chat_template_kwargs": NO_THINKING}
    body, ids = encode("/v1/chat/completions", {**fields, "stream": True, "stream_options": {"include_usage": True}})
    events = api.events("/v1/chat/completions", **body)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert text == post(api, "/v1/chat/completions", {**SHORT, **fields})["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["prompt_tokens"] == len(ids)


def test_responses_and_messages(api: Api, encode: Encode) -> None:
    chat, ids = encode("/v1/chat/completions", {"messages": [user("Hello")], "thinking": {"type": "disabled"}})
    expected = post(api, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    body, same = encode("/v1/messages", {"messages": [user("Hello")], "thinking": {"type": "disabled"}})
    answer = api.http.post("/v1/messages", json=body).json()
    assert (same, answer["usage"]["input_tokens"]) == (ids, len(ids))
    assert answer["content"][0]["text"] == expected
    fields = {"input": "Hello", "max_output_tokens": 12, "chat_template_kwargs": NO_THINKING}
    body, same = encode("/v1/responses", fields)
    answer = api.http.post("/v1/responses", json=body).json()
    assert (same, answer["usage"]["input_tokens"]) == (ids, len(ids))
    assert answer["output"][-1]["content"][0]["text"] == expected


def test_tools_stand_in_the_prompt_as_recipe_has_them(api: Api, encode: Encode) -> None:
    """vLLM writes a tool as it came; recipe gives it the parameters that it lacks."""
    fields = {"messages": QUESTION, "tools": [LOOSE], "chat_template_kwargs": NO_THINKING}
    body, ids = encode("/v1/chat/completions", fields)
    assert post(api, "/v1/chat/completions", body)["usage"]["prompt_tokens"] == len(ids)
    theirs = api.post("/tokenize", messages=QUESTION, tools=[LOOSE], chat_template_kwargs=NO_THINKING)["tokens"]
    assert ids != theirs


def test_calls_are_parsed(api: Api, encode: Encode) -> None:
    fields = {
        "messages": [user("How is the weather?")],
        "tools": [WEATHER],
        "chat_template_kwargs": NO_THINKING,
        "structured_outputs": {"grammar": CALL_GRAMMAR},
        "max_tokens": 200,
    }
    body, _ = encode("/v1/chat/completions", fields)
    calls = post(api, "/v1/chat/completions", body)["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"get_weather"}
    assert set(orjson.loads(calls[0]["function"]["arguments"])) == {"city", "days"}


def test_special_tokens_in_text_stay_text(api: Api, encode: Encode, tokenizer: Tokenizer) -> None:
    number = tokenizer.token_to_id("<｜User｜>")
    _, ids = encode("/v1/chat/completions", {"messages": [user("<｜User｜>")]})
    assert ids.count(number) == 1


def test_token_ids_that_an_engine_does_not_have_are_refused(api: Api, encode: Encode) -> None:
    body, _ = encode("/v1/chat/completions", {"messages": QUESTION})
    body["kv_transfer_params"]["prompt_token_ids"] = [10**6]
    assert api.http.post("/v1/chat/completions", json=body).status_code == 400
