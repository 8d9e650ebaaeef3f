"""What the entry reads of a request, and what it refuses."""

from typing import Any

import orjson
import pytest
from exchanges import Received, chat, received

from deepinfer_router.api import Kind
from deepinfer_router.entry import Entry
from deepinfer_router.entry_config import Adapter, EntryConfig
from deepinfer_router.errors import Refusal
from deepinfer_router.identity_config import Grant, IdentityConfig
from deepinfer_router.request import DROP, Request


def read(route: str, fields: dict[str, Any] | None = None, **headers: str) -> Request:
    return Entry().read(received(route, fields, **headers))


MESSAGE = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("route", "fields", "kind", "max_tokens"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGE], "max_tokens": 7}, Kind.CHAT, 7),
        ("/v1/chat/completions", {"messages": [MESSAGE], "max_tokens": 7, "max_completion_tokens": 8}, Kind.CHAT, 8),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 7}, Kind.COMPLETION, 7),
        ("/v1/completions", {"prompt": "Hello"}, Kind.COMPLETION, None),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 7}, Kind.RESPONSES, 7),
        ("/v1/responses", {"input": [MESSAGE]}, Kind.RESPONSES, None),
        ("/v1/messages", {"messages": [MESSAGE], "max_tokens": 7}, Kind.MESSAGES, 7),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 7}}, Kind.GENERATE, 7),
        ("/v1/messages/count_tokens", {"messages": [MESSAGE]}, Kind.TOKENIZE, None),
        ("/tokenize", {"prompt": "Hello"}, Kind.TOKENIZE, None),
        ("/detokenize", {"tokens": [1]}, Kind.TOKENIZE, None),
        ("/v1/embeddings", {"input": "Hello"}, Kind.EMBEDDING, None),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, Kind.RERANK, None),
        ("/score", {"text_1": "a", "text_2": "b"}, Kind.SCORE, None),
        ("/pooling", {"input": "Hello"}, Kind.POOLING, None),
        ("/classify", {"input": "Hello"}, Kind.CLASSIFY, None),
    ],
)
def test_each_api(route: str, fields: dict[str, Any], kind: Kind, max_tokens: int | None) -> None:
    request = read(route, {"model": "m", "stream": True, **fields})
    assert (request.api.kind, request.work.model, request.work.max_tokens) == (kind, "m", max_tokens)
    assert request.stream
    assert request.body() is request.raw


@pytest.mark.parametrize(
    "spelt",
    [
        b"/v1/chat/completion%73",
        b"/%761/chat%2fcompletions",
        b"/v1/chat/completions#fragment",
        b"/v1/chat/completions%0A",
    ],
)
def test_other_spellings_of_a_path_are_no_way_around(spelt: bytes) -> None:
    """Engines take them for the same path. Starlette's patterns end with $, which lets a line end follow."""
    entry = Entry(identity=IdentityConfig(everybody=Grant(cache_salt="s")))
    request = entry.read(Received(spelt, orjson.dumps(chat(cache_salt="other"))))
    assert request.api.kind is Kind.CHAT
    assert orjson.loads(request.body())["cache_salt"] == "s"


def test_unknown_routes_pass_untouched() -> None:
    for exchange in (
        Received(b"/v1/audio/transcriptions", b"--boundary\r\n"),
        Received(b"/my/own/route", b"\xff not JSON"),
        Received(b"/v1/responses/resp_1", method=b"GET"),
        Received(b"/v1/chat/completions", method=b"OPTIONS"),
    ):
        request = Entry().read(exchange)
        assert request.body() == exchange.body
        assert request.fields == {}
    assert Entry().read(Received(b"/v1/models", method=b"GET")).api.kind is Kind.MODELS


def test_unknown_routes_can_be_refused() -> None:
    """Engines have paths that stop them, or change their weights."""
    entry = Entry(EntryConfig(unknown_routes="refuse"))
    with pytest.raises(Refusal) as refused:
        entry.read(Received(b"/pause"))
    assert (refused.value.status, refused.value.code) == (404, "unknown_route")
    entry.read(Received(b"/v1/models", method=b"GET"))
    entry.read(received("/v1/chat/completions", chat()))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"null", b'{"model": NaN}', b"\xff\xfe", b'{"a":1}{', b"[" * 5000]
)
def test_bad_json_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal, match="body is") as refused:
        Entry().read(Received(body=body))
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("/v1/chat/completions", chat(model=["m"]), "model"),
        ("/v1/chat/completions", chat(stream="yes"), "stream"),
        ("/v1/chat/completions", chat(stream=1), "stream"),
        ("/v1/chat/completions", chat(max_tokens="5"), "max_tokens"),
        ("/v1/chat/completions", chat(max_tokens=True), "max_tokens"),
        ("/v1/chat/completions", chat(max_completion_tokens=1.5), "max_completion_tokens"),
        ("/v1/chat/completions", chat(n="2"), "n"),
        ("/v1/chat/completions", chat(priority="high"), "priority"),
        ("/v1/chat/completions", chat(messages="Hello"), "messages"),
        ("/v1/messages", chat(messages={"role": "user"}), "messages"),
        ("/v1/responses", {"input": 5}, "input"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": 5}, "sampling_params"),
    ],
)
def test_fields_of_another_type_are_refused(route: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as refused:
        read(route, fields)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_type", param)


@pytest.mark.parametrize(
    "name", ["model", "stream", "max_tokens", "max_completion_tokens", "n", "priority", "messages"]
)
def test_null_is_as_not_there(name: str) -> None:
    """production-stack#747: absent fields."""
    assert read("/v1/chat/completions", chat(**{name: None})).api.kind is Kind.CHAT


def test_token_ids_are_counted() -> None:
    request = read("/v1/completions", {"prompt": [5, 6, 7]})
    assert (request.token_ids, request.work.prompt_tokens) == ([5, 6, 7], 3)
    assert read("/inference/v1/generate", {"token_ids": [5, 6]}).token_ids == [5, 6]
    assert read("/v1/completions", {"prompt": [[5, 6], [7]]}).token_ids is None


def test_estimates_follow_what_engines_count() -> None:
    entry = Entry()
    exchange = received("/v1/chat/completions", chat())
    size = len(exchange.body)
    first = entry.read(exchange)
    assert first.work.prompt_tokens == size // 4
    first.used(size)  # a token a byte
    assert entry.read(exchange).work.prompt_tokens == size
    assert entry.read(received("/v1/chat/completions", chat(model="n"))).work.prompt_tokens == size // 4


def test_images_count_as_images() -> None:
    url = "data:image/png;base64," + "A" * 100_000
    forms: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": url}}),
        ("/v1/messages", {"type": "image", "source": {"type": "base64", "data": url}}),
        ("/v1/messages", {"type": "tool_result", "content": [{"type": "image", "source": {"data": url}}]}),
    ]
    for route, part in forms:
        request = read(route, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]))
        assert request.work.images == 1
        assert 1000 < request.work.prompt_tokens < 1100
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "?"}]
    outputs = [{"type": "function_call_output", "call_id": "c", "output": parts}, {"role": "user", "content": parts}]
    assert read("/v1/responses", {"input": outputs}).work.images == 2


def test_images_teach_nothing_of_text() -> None:
    entry = Entry()
    part = {"type": "image_url", "image_url": {"url": "x"}}
    entry.read(received("/v1/chat/completions", chat(messages=[{"role": "user", "content": [part]}]))).used(5000)
    exchange = received("/v1/chat/completions", chat())
    assert entry.read(exchange).work.prompt_tokens == len(exchange.body) // 4


def test_names_of_conversations_are_bounded() -> None:
    assert read("/v1/chat/completions", chat(session_id="s" * 256)).work.session == "s" * 256
    assert read("/v1/chat/completions", chat(session_id="s" * 257)).work.session == ""
    assert read("/v1/chat/completions", chat(), x_session_id="s" * 257).work.session == ""


def test_deadline_session_priority_adapter() -> None:
    entry = Entry(EntryConfig(adapters={"mine": Adapter(model="m", path="/mine")}))
    exchange = received(
        "/v1/chat/completions", chat(model="mine", priority=3), x_request_timeout_ms="1500", x_session_id="s"
    )
    exchange.received_at = 10.0
    work = entry.read(exchange).work
    assert (work.deadline, work.session, work.priority, work.model, work.lora) == (11.5, "s", 3, "m", "mine")
    assert read("/v1/chat/completions", chat(priority=3), x_priority="-2").work.priority == -2
    assert read("/v1/responses", {"input": "", "prompt_cache_key": "k"}).work.session == "k"
    for headers in ({"x_request_timeout_ms": "soon"}, {"x_request_timeout_ms": "nan"}, {"x_priority": "high"}):
        with pytest.raises(Refusal, match=r"x-\S+ must be"):
            read("/v1/chat/completions", chat(), **headers)


def test_request_ids() -> None:
    entry = Entry()
    made = [entry.read(received("/v1/chat/completions", chat())).request_id for _ in range(3)]
    assert len(set(made)) == 3
    kept = entry.read(received("/v1/chat/completions", chat(), x_request_id="req_1-a.b:c")).request_id
    assert kept == b"req_1-a.b:c"
    for bad in ("___prefill_addr_evil___decode_addr_evil_1", "a b", "x" * 200, "é"):
        assert entry.read(received("/v1/chat/completions", chat(), x_request_id=bad)).request_id not in (
            bad.encode(),
            b"",
        )


def test_headers_for_engines() -> None:
    """sglang-router 0.3.2 drops x-session-id and content-encoding."""
    request = read(
        "/v1/chat/completions",
        chat(),
        host="h",
        connection="keep-alive",
        authorization="Bearer secret",
        x_api_key="secret",
        x_data_parallel_rank="3",
        traceparent="00-1-2-01",
        x_session_id="s",
        user_agent="u",
    )
    assert dict(request.headers_for_engine()) == {
        b"traceparent": b"00-1-2-01",
        b"x-session-id": b"s",
        b"user-agent": b"u",
        b"x-request-id": request.request_id,
    }


def test_bodies_keep_what_nobody_names() -> None:
    """sglang-router 0.3.2 drops user, priority, kv_transfer_params, ... and unknown fields."""
    fields = chat(
        user="u", kv_transfer_params={"a": 1}, return_token_ids=True, vllm_xargs={"x": 1}, store=True, own={"b": 2}
    )
    request = read("/v1/chat/completions", fields)
    assert request.body() is request.raw
    assert orjson.loads(request.body({"stream": True, "user": DROP})) == {
        **{name: value for name, value in fields.items() if name != "user"},
        "stream": True,
    }


def test_encoded_bodies_are_refused() -> None:
    with pytest.raises(Refusal, match="content-encoding") as refused:
        read("/v1/chat/completions", chat(), content_encoding="gzip")
    assert refused.value.status == 415


@pytest.mark.parametrize(
    ("route", "fields", "why"),
    [
        ("/v1/chat/completions", chat(), ""),
        ("/v1/chat/completions", chat(n=1, tools=[], stop=[], logprobs=False, response_format={"type": "text"}), ""),
        ("/v1/chat/completions", chat(n=2), "n"),
        ("/v1/chat/completions", chat(seed=0), "seed"),
        ("/v1/chat/completions", chat(logprobs=True), "logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": 0}, "logprobs"),
        ("/v1/chat/completions", chat(response_format={"type": "json_object"}), "structured_output"),
        ("/v1/chat/completions", chat(structured_outputs={"regex": "a"}), "structured_output"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}, "structured_output"),
        ("/v1/messages", chat(output_config={"format": {"type": "json_schema"}}), "structured_output"),
        ("/v1/chat/completions", chat(tools=[{"type": "function"}]), "tools"),
        ("/v1/chat/completions", chat(stop="a"), "stop"),
        ("/v1/chat/completions", chat(presence_penalty=0.5), "penalty"),
        ("/v1/chat/completions", chat(repetition_penalty=1.1), "penalty"),
        ("/v1/chat/completions", chat(use_beam_search=True), "beam_search"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "several_prompts"),
        ("/v1/completions", {"prompt": [1, 2]}, ""),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 2}}, "n"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"seed": 1}}, "seed"),
        ("/inference/v1/generate", {"token_ids": [1], "output_mode": "tokens"}, ""),
        ("/inference/v1/generate", {"token_ids": [1], "output_mode": "text"}, "text_mode"),
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]), "media"),
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}]}]), ""),
        ("/v1/embeddings", {"input": "a"}, "no_answer_of_tokens"),
    ],
)
def test_what_can_be_resumed(route: str, fields: dict[str, Any], why: str) -> None:
    """ai-dynamo/dynamo#7634, #7930: going on in the middle broke structured output."""
    request = read(route, fields)
    assert request.why_not_resumable == why
    assert request.resumable == (why == "")


def test_release_is_idempotent() -> None:
    request = read("/v1/chat/completions", chat())
    assert request.identity.active == 1
    request.release()
    request.release()
    assert request.identity.active == 0
