"""Conversations in tokens: those of recipe's own encoder, with what was encoded before remembered."""

import asyncio
import json
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import orjson
import pytest
from exchanges import received
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_case import recipe_entry, write_tokenizer
from tokenizers import Tokenizer

from deepinfer_router import encoding, recipe_encoding, text_tokens
from deepinfer_router.api import CHAT, MESSAGES, Kind
from deepinfer_router.error_body import render
from deepinfer_router.errors import Refusal, RouterConfigError
from deepinfer_router.identity_config import Grant, IdentityConfig
from deepinfer_router.recipe_config import RecipeConfig
from deepinfer_router.recipe_encoding import RecipeEncoder, why_not_encoded
from deepinfer_router.request import Request
from deepinfer_router.store_config import StoreConfig
from deepinfer_router.text_tokens import TextTokens
from deepinfer_vllm.checkpoint.special_tokens import BOS, IMAGE, NAMED, SYSTEM
from deepinfer_vllm.checkpoint.tokenizer import build_tokenizer

USER, ASSISTANT, THINK, THOUGHT = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(1024)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def encoder(file: Path) -> RecipeEncoder:
    return RecipeEncoder(RecipeConfig(tokenizer=file))


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    """Recipe's own way, which remembers nothing: from a chat body to token ids."""
    special = recipe.SpecialTokens(image=IMAGE)
    whole = recipe.Tokenizer.from_file(str(file))
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(whole).with_special_tokens(special)
    options = recipe.ConversionOptions().with_special_tokens(special)

    def encode(fields: dict[str, Any]) -> list[int]:
        body = json.dumps({**fields, "model": "DeepSeek-V4.1-Flash"}).encode()
        ids: list[int] = encoding.encode(recipe.ChatCompletionRequest(body).convert(options).conversation)
        return ids

    return encode


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


PIECES = st.text(max_size=12) | st.sampled_from([*NAMED, BOS, IMAGE, "\n\n", "  ", "don't", "é" * 300])
TEXTS = st.lists(PIECES, max_size=5).map("".join)
TURNS = st.lists(
    st.one_of(
        st.builds(user, TEXTS),
        st.builds(lambda text: {"role": "system", "content": text}, TEXTS),
        st.builds(lambda text, why: {"role": "assistant", "content": text, "reasoning_content": why}, TEXTS, TEXTS),
    ),
    max_size=6,
)


@settings(max_examples=300)
@given(turns=TURNS, last=TEXTS, effort=st.sampled_from([None, "none", "low", "max"]), tools=st.booleans())
def test_like_recipes_own_encoder(
    encoder: RecipeEncoder, reference: Any, turns: list[Any], last: str, effort: str | None, tools: bool
) -> None:
    fields = {"messages": [*turns, user(last)], "tools": [TOOL] if tools else []}
    if effort:
        fields["reasoning_effort"] = effort
    for _ in range(2):  # the second time from memory
        encoded = encoder.encode(Kind.CHAT, fields)
        assert encoded.token_ids == reference(fields)
    assert orjson.loads(encoded.as_json) == encoded.token_ids
    assert encoded.thinking == (effort != "none")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "disabled"}}, f"{BOS}{USER}Hi{ASSISTANT}{THOUGHT}"),
        ({}, f"{BOS}{SYSTEM}{EFFORT.format(75)}{USER}Hi{ASSISTANT}{THINK}"),
        ({"reasoning_effort": "low"}, f"{BOS}{SYSTEM}{EFFORT.format(50)}{USER}Hi{ASSISTANT}{THINK}"),
        ({"reasoning_effort": "max"}, f"{BOS}{SYSTEM}{EFFORT.format(100)}{USER}Hi{ASSISTANT}{THINK}"),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, user("Hi")], "reasoning_effort": "none"},
            f"{BOS}{SYSTEM}Be brief.{USER}Hi{ASSISTANT}{THOUGHT}",
        ),
        (
            {"messages": [user("a"), {"role": "assistant", "content": "b", "reasoning_content": "r"}, user("c")]},
            f"{BOS}{SYSTEM}{EFFORT.format(75)}{USER}a{ASSISTANT}{THOUGHT}b<｜end▁of▁sentence｜>{USER}c{ASSISTANT}{THINK}",
        ),
    ],
)
def test_prompts(encoder: RecipeEncoder, tokenizer: Tokenizer, fields: dict[str, Any], expected: str) -> None:
    ids = encoder.encode(Kind.CHAT, {"messages": [user("Hi")], **fields}).token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize("token", [*NAMED, BOS, "<｜end▁of▁sentence｜>", IMAGE])
def test_special_tokens_in_a_users_text_stay_text(encoder: RecipeEncoder, tokenizer: Tokenizer, token: str) -> None:
    """Else a user could speak as the system."""
    number = tokenizer.token_to_id(token)
    count = {
        text: encoder.encode(Kind.CHAT, {"messages": [user(text)]}).token_ids.count(number)
        for text in ("Hi", f"{token}Hi{token}")
    }
    assert count[f"{token}Hi{token}"] == count["Hi"]


def test_one_conversation_is_the_same_in_every_api(encoder: RecipeEncoder) -> None:
    chat = encoder.encode(Kind.CHAT, {"messages": [{"role": "system", "content": "S"}, user("Hi")]})
    messages = encoder.encode(Kind.MESSAGES, {"system": "S", "messages": [user("Hi")]})
    responses = encoder.encode(Kind.RESPONSES, {"instructions": "S", "input": "Hi"})
    assert chat == messages == responses


@pytest.mark.parametrize("kwargs", [{"thinking": False}, {"enable_thinking": False}, {"reasoning_effort": "max"}])
def test_vllms_way_to_ask_for_thinking(encoder: RecipeEncoder, kwargs: dict[str, Any]) -> None:
    official = {"reasoning_effort": "none" if "reasoning_effort" not in kwargs else "max"}
    expected = encoder.encode(Kind.CHAT, {"messages": [user("Hi")], **official})
    asked = {"messages": [user("Hi")], "chat_template_kwargs": kwargs}
    assert encoder.encode(Kind.CHAT, asked) == expected
    if "reasoning_effort" not in kwargs:
        assert encoder.encode(Kind.MESSAGES, asked) == expected
    assert encoder.encode(Kind.RESPONSES, {"input": "Hi", "chat_template_kwargs": kwargs}) == expected
    assert encoder.encode(Kind.CHAT, {**asked, "reasoning_effort": "low"}) != expected  # the API's own counts


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        (Kind.CHAT, {"messages": []}, ""),
        (Kind.CHAT, {"tool_choice": "auto", "tools": [TOOL]}, ""),
        (Kind.CHAT, {"tool_choice": "required"}, "tool_choice"),
        (Kind.CHAT, {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        (Kind.MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (Kind.MESSAGES, {"tool_choice": {"type": "auto"}}, ""),
        (Kind.CHAT, {"chat_template": "x"}, "template"),
        (Kind.CHAT, {"add_generation_prompt": False}, "template"),
        (Kind.RESPONSES, {"previous_response_id": "r"}, "previous_response"),
        (Kind.COMPLETION, {}, "api"),
    ],
)
def test_what_the_engine_encodes(kind: Kind, fields: dict[str, Any], why: str) -> None:
    assert why_not_encoded(kind, fields) == why


def prepared(file: Path, route: str, fields: dict[str, Any], **options: Any) -> Request:
    async def run() -> Request:
        entry = recipe_entry(file, **options)
        request = entry.read(received(route, fields))
        await entry.prepare(request)
        await entry.close()
        return request

    return asyncio.run(run())


ROUTES = [
    ("/v1/chat/completions", {"messages": [user("Hi")]}),
    ("/v1/messages", {"messages": [user("Hi")], "max_tokens": 5}),
    ("/v1/responses", {"input": "Hi"}),
]


@pytest.mark.parametrize(("route", "fields"), ROUTES)
def test_engines_are_sent_the_token_ids(file: Path, encoder: RecipeEncoder, route: str, fields: dict[str, Any]) -> None:
    request = prepared(file, route, {"model": "m", "own": 1, **fields})
    expected = encoder.encode(Kind.CHAT, {"messages": [user("Hi")]}).token_ids
    assert request.token_ids == expected
    assert request.work.prompt_tokens == len(expected)
    assert orjson.loads(request.body({"stream": True})) == {
        "model": "m",
        "own": 1,
        **fields,
        "kv_transfer_params": {"prompt_token_ids": expected},
        "chat_template_kwargs": {"thinking": True, "enable_thinking": True},
        "stream": True,
    }


def test_beside_what_the_store_is_told(file: Path) -> None:
    store = StoreConfig(socket=file.parent / "no.sock")
    identity = IdentityConfig(everybody=Grant(tenant="t"))
    fields = {"messages": [user("Hi")], "kv_transfer_params": {"prompt_token_ids": [1]}}
    request = prepared(file, "/v1/chat/completions", fields, store=store, identity=identity)
    params = orjson.loads(request.body())["kv_transfer_params"]
    assert params == {"kvstore": {"tenant": "t"}, "prompt_token_ids": request.token_ids}


def test_strict_tools_reach_the_engine_as_the_prompt_has_them(file: Path) -> None:
    closed = {**TOOL["function"]["parameters"], "additionalProperties": False, "required": ["a", "b"]}  # type: ignore[index]
    loose = {"type": "function", "function": {"name": "loose", "parameters": {"type": "object"}}}
    body = orjson.loads(prepared(file, *ROUTES[0][:1], {"messages": [user("Hi")], "tools": [TOOL]}).body())
    assert body["tools"] == [{"type": "function", "function": {**TOOL["function"], "parameters": closed}}]  # type: ignore[dict-item]
    flat = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    body = orjson.loads(prepared(file, "/v1/responses", {"input": "Hi", "tools": [flat]}).body())
    assert body["tools"] == [{**flat, "parameters": closed}]
    body = orjson.loads(prepared(file, "/v1/chat/completions", {"messages": [user("Hi")], "tools": [loose]}).body())
    assert body["tools"] == [loose]


@pytest.mark.parametrize(
    ("fields", "result"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "media"),
        ({"messages": [user("Hi")], "tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"messages": [user("Hi")], "model": "other"}, "model"),
    ],
)
def test_what_is_left_to_the_engine_passes_untouched(file: Path, fields: dict[str, Any], result: str) -> None:
    before = encoding.ENCODINGS.labels(result).value
    request = prepared(file, "/v1/chat/completions", {"model": "m", **fields}, recipe={"models": ("m",)})
    assert request.body() is request.raw
    assert request.token_ids is None
    assert encoding.ENCODINGS.labels(result).value == before + 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": [user("Hi")], "response_format": {"type": "json_object"}}, "json"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "developer"),
        ({"messages": []}, "Empty input messages"),
        ({}, "messages"),
    ],
)
def test_what_the_official_api_refuses(file: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=says) as refused:
        prepared(file, "/v1/chat/completions", fields)
    status, _, body = render(refused.value, CHAT)
    assert (status, orjson.loads(body)["error"]["type"]) == (400, "invalid_request_error")
    with pytest.raises(Refusal) as refused:
        prepared(file, "/v1/messages", {"messages": []})
    assert orjson.loads(render(refused.value, MESSAGES)[2])["error"]["type"] == "invalid_request_error"


def test_the_loop_goes_on_meanwhile(file: Path) -> None:
    async def run() -> int:
        entry = recipe_entry(file)
        request = entry.read(received("/v1/chat/completions", {"messages": [user("The quick brown fox. " * 20_000)]}))
        task = asyncio.create_task(entry.prepare(request))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0.001)
        await task
        await entry.close()
        return turns

    assert asyncio.run(run()) > 3


def test_turns_are_encoded_once(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    encoder = RecipeEncoder(RecipeConfig(tokenizer=file))
    encoded: list[str] = []
    texts = encoder._texts
    plain = texts._encode
    monkeypatch.setattr(texts, "_encode", lambda text: (encoded.append(text), plain(text))[1])
    messages: list[dict[str, Any]] = []
    for turn in range(4):
        messages.append(user(f"question {turn} " + "x " * 200))
        encoder.encode(Kind.CHAT, {"messages": messages})
        messages.append({"role": "assistant", "content": f"answer {turn} " + "y " * 200})
    long = [text for text in encoded if len(text) >= text_tokens.SMALL_CHARS]
    assert len(long) == len(set(long)) == 4 + 3


def test_long_texts_are_encoded_by_another_process(
    file: Path, reference: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As here, and here where there is none: a process that was ended costs no request."""
    encoder = RecipeEncoder(RecipeConfig(tokenizer=file, cache_bytes=0))
    fields = {"messages": [user("naïve 🙂 1234567\n\n" * (recipe_encoding.LONG_CHARS // 8))]}
    expected = reference(fields)
    assert len(expected) > 3 * recipe_encoding._AT_ONCE
    idle = encoder._beside._idle
    for process_is_ended in (False, False, True, False):
        if process_is_ended:
            idle[0].kill()
        encoded = encoder.encode(Kind.CHAT, fields)
        assert encoded.token_ids == expected == orjson.loads(encoded.as_json)
        assert len(idle) == (not process_is_ended)
        assert ("no process to do it" in caplog.text) == process_is_ended
        caplog.clear()
    [process] = idle
    encoder.close()
    encoder.close()
    assert process.returncode is not None and not idle


def test_memory_is_bounded_and_the_oldest_goes() -> None:
    """production-stack#687, #707; dynamo#10774: unbounded tries ended routers."""
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return [1] * len(text)

    texts = TextTokens(encode, 10_000)
    for number in range(100):
        texts.tokens(f"{number:04d}" * 100, "")
        assert texts.held_bytes <= 10_000
    calls.clear()
    assert list(texts.tokens("0099" * 100, "")) == [1] * 400
    assert calls == []
    texts.tokens("0000" * 100, "")
    texts.tokens("0099" * 100, "other salt")
    texts.tokens("short", "")
    texts.tokens("short", "")
    assert calls == ["0000" * 100, "0099" * 100, "short", "short"]
    texts.tokens("x" * 20_000, "")  # more than there is room for
    assert texts.held_bytes <= 10_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "no tokenizer.json"),
        ("{}", "does not fit V4.1: Model missing"),
    ],
)
def test_tokenizers_that_will_not_do(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(RouterConfigError, match=says):
        RecipeEncoder(RecipeConfig(tokenizer=tmp_path))
    with pytest.raises(RouterConfigError, match="missing"):
        RecipeEncoder(RecipeConfig())


def test_another_models_tokenizer_is_refused(root: Path) -> None:
    with pytest.raises(RouterConfigError, match="does not fit V4.1: .*System"):
        RecipeEncoder(RecipeConfig(tokenizer=root / "tests/golden/v41-tiny-a"))


def test_a_tokenizer_that_reads_parts_otherwise_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is known; should recipe come to encode otherwise, the router says so when it starts."""

    class Otherwise(TextTokens):
        def tokens(self, text: str, salt: str) -> Any:
            return super().tokens(" " + text, salt)

    monkeypatch.setattr(recipe_encoding, "TextTokens", Otherwise)
    with pytest.raises(RouterConfigError, match="otherwise in parts than as a whole"):
        RecipeEncoder(RecipeConfig(tokenizer=file))


def test_what_nests_too_deep_is_refused(encoder: RecipeEncoder) -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"a": deep}
    with pytest.raises(Refusal, match="(?i)recursion"):
        encoder.encode(Kind.CHAT, {"messages": [user("Hi")], "tools": [{"type": "function", "function": deep}]})
