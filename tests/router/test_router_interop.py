"""The official clients of OpenAI and Anthropic through the router, onto mock engines that answer as vLLM does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel
from router_process import RouterProcess

from deepinfer_simulator import engine_tokens as tokens
from deepinfer_simulator.engine_requests import chat_prompt
from deepinfer_simulator.engine_server import MockEngine
from mock_engines import mock_engines_in_thread

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def engines() -> Iterator[list[MockEngine]]:
    with mock_engines_in_thread(2) as found:
        yield found


@pytest.fixture(scope="module")
def url(engines: list[MockEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "deepinfer_vllm.cli.main",
        "router",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "127.0.0.1:0",
    ]
    command += ["--engines", ",".join(engine.url for engine in engines)]
    with RouterProcess(command, tmp_path_factory.mktemp("interop")) as router:
        yield f"http://127.0.0.1:{router.port}"


@pytest.fixture(autouse=True)
def healthy(engines: list[MockEngine]) -> Iterator[None]:
    yield
    for engine in engines:
        engine.faults.clear()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as found:
        yield found


def said(messages: list[Any], count: int) -> str:
    return tokens.decode(tokens.continuation(chat_prompt(messages), count))


def test_openai_chat(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="mock", messages=HELLO, max_tokens=12)  # type: ignore[call-overload]
    assert found.choices[0].message.content == said(HELLO, 12)
    assert found.usage.completion_tokens == 12 and found.usage.prompt_tokens == len(chat_prompt(HELLO))


def test_openai_chat_stream(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model="mock", messages=HELLO, max_tokens=50, stream=True, stream_options=options
    )
    events = list(stream)
    assert "".join(event.choices[0].delta.content for event in events if event.choices) == said(HELLO, 50)
    assert events[-1].usage.completion_tokens == 50


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tools(client: openai.OpenAI, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    asked: dict[str, Any] = {"model": "mock", "messages": HELLO, "tools": [tool], "tool_choice": "required"}
    found = client.chat.completions.create(**asked, stream=stream, max_tokens=100)
    if stream:
        calls = [event.choices[0].delta.tool_calls[0] for event in found if event.choices[0].delta.tool_calls]
        name, arguments = calls[0].function.name, "".join(call.function.arguments or "" for call in calls)
    else:
        (call,) = found.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        assert found.choices[0].finish_reason == "tool_calls"
    assert (name, json.loads(arguments)) == ("weather", {"city": "a"})


def test_openai_pictures(client: openai.OpenAI) -> None:
    content = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    messages = [{"role": "user", "content": content}]
    found = client.chat.completions.create(model="mock", messages=messages, max_tokens=6)  # type: ignore[call-overload]
    assert found.choices[0].message.content == said(messages, 6)


def test_openai_structured_output(client: openai.OpenAI) -> None:
    class Place(BaseModel):
        city: str
        people: int

    found = client.chat.completions.parse(model="mock", messages=HELLO, response_format=Place, max_tokens=100)  # type: ignore[arg-type]
    assert found.choices[0].message.parsed == Place(city="a", people=0)


def test_openai_responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="mock", input="hello", max_output_tokens=9)
    events = list(client.responses.create(model="mock", input="hello", max_output_tokens=9, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert whole.output_text == text == said(HELLO, 9)
    assert events[-1].type == "response.incomplete"


def test_openai_other_endpoints(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["mock"]
    found = client.completions.create(model="mock", prompt="once", max_tokens=7)
    assert found.choices[0].text == tokens.decode(tokens.continuation(tokens.encode("once"), 7))
    assert len(client.embeddings.create(model="mock", input=["a", "b"], encoding_format="float").data) == 2


def test_openai_errors_keep_their_kind(client: openai.OpenAI, engines: list[MockEngine]) -> None:
    ask: Any = client.chat.completions.create
    with pytest.raises(openai.NotFoundError):
        ask(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError):
        ask(model="mock", messages=[])
    for status, kind in ((429, openai.RateLimitError), (503, openai.InternalServerError)):
        for engine in engines:
            engine.faults.set("status", status=status, retry_after_s=3)
        with pytest.raises(kind) as raised:
            ask(model="mock", messages=HELLO)
        assert int(raised.value.response.headers["retry-after"]) >= 1


def test_openai_sees_that_a_stream_was_cut(client: openai.OpenAI, engines: list[MockEngine]) -> None:
    for engine in engines:
        engine.faults.set("fin_mid", after_events=4, times=1)
    stream = client.chat.completions.create(model="mock", messages=HELLO, max_tokens=50, stream=True)  # type: ignore[call-overload]
    with pytest.raises(openai.APIError):
        list(stream)


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    found = claude.messages.create(model="mock", messages=HELLO, max_tokens=11)  # type: ignore[arg-type]
    assert found.content[0].text == said(HELLO, 11) and found.stop_reason == "max_tokens"  # type: ignore[union-attr]
    with claude.messages.stream(model="mock", messages=HELLO, max_tokens=30) as stream:  # type: ignore[arg-type]
        assert "".join(stream.text_stream) == said(HELLO, 30)
        assert stream.get_final_message().usage.output_tokens == 30


def test_anthropic_tools_and_pictures(claude: anthropic.Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "where?"}]}]
    asked: dict[str, Any] = {
        "model": "mock",
        "messages": messages,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
        "max_tokens": 100,
    }
    found = claude.messages.create(**asked)
    (block,) = found.content
    assert (block.name, block.input, found.stop_reason) == ("weather", {"city": "a"}, "tool_use")
    with claude.messages.stream(**asked) as stream:
        assert stream.get_final_message().content[0].input == {"city": "a"}  # type: ignore[union-attr]


def test_anthropic_errors_keep_their_kind(claude: anthropic.Anthropic, engines: list[MockEngine]) -> None:
    asked: dict[str, Any] = {"model": "mock", "messages": HELLO, "max_tokens": 5}
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**asked, "model": "other"})
    for engine in engines:
        engine.faults.set("status", status=429, retry_after_s=3)
    with pytest.raises(anthropic.RateLimitError):
        claude.messages.create(**asked)


def test_anthropic_sees_that_a_stream_was_cut(claude: anthropic.Anthropic, engines: list[MockEngine]) -> None:
    for engine in engines:
        engine.faults.set("reset_mid", after_events=5, times=1)
    with (
        pytest.raises(anthropic.APIError),
        claude.messages.stream(model="mock", messages=HELLO, max_tokens=50) as stream,
    ):  # type: ignore[arg-type]
        stream.until_done()
