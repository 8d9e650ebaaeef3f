"""Every way in: one answer, and the same answer when it is streamed."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from serving.client import NO_THINKING, Api, Json, user

QUESTION = "Tell me a story about a small boat."


@dataclass(frozen=True)
class Endpoint:
    """How one API is asked, where its text is, and which events of its stream carry text."""

    path: str
    body: Json
    text: Callable[[Json], str]
    piece: Callable[[Json], str]


def _content(answer: Json, kind: str, field: str) -> str:
    return "".join(part[field] for part in answer["content"] if part["type"] == kind)


def _response_text(answer: Json, item_type: str, part_type: str) -> str:
    return "".join(_content(item, part_type, "text") for item in answer["output"] if item["type"] == item_type)


def _event(kind: str, *path: str) -> Callable[[Json], str]:
    def piece(event: Json) -> str:
        if event["type"] != kind:
            return ""
        value: object = event
        for key in path:
            value = value.get(key, "") if isinstance(value, dict) else ""
        return str(value)

    return piece


ENDPOINTS = {
    "chat": Endpoint(
        "/v1/chat/completions",
        {"messages": [user(QUESTION)], "max_tokens": 24, "chat_template_kwargs": NO_THINKING},
        lambda answer: answer["choices"][0]["message"]["content"],
        lambda event: event["choices"][0]["delta"].get("content") or "" if event["choices"] else "",
    ),
    "completions": Endpoint(
        "/v1/completions",
        {"prompt": QUESTION, "max_tokens": 24},
        lambda answer: answer["choices"][0]["text"],
        lambda event: event["choices"][0]["text"] if event["choices"] else "",
    ),
    "responses": Endpoint(
        "/v1/responses",
        {"input": QUESTION, "max_output_tokens": 24, "reasoning": {"effort": "none"}},
        lambda answer: _response_text(answer, "message", "output_text"),
        _event("response.output_text.delta", "delta"),
    ),
    "responses, thinking": Endpoint(
        "/v1/responses",
        {"input": QUESTION, "max_output_tokens": 24, "reasoning": {"effort": "high"}},
        lambda answer: _response_text(answer, "reasoning", "reasoning_text"),
        _event("response.reasoning_text.delta", "delta"),
    ),
    "messages": Endpoint(
        "/v1/messages",
        {"messages": [user(QUESTION)], "max_tokens": 24, "thinking": {"type": "disabled"}},
        lambda answer: _content(answer, "text", "text"),
        _event("content_block_delta", "delta", "text"),
    ),
    "messages, thinking": Endpoint(
        "/v1/messages",
        {"messages": [user(QUESTION)], "max_tokens": 24},
        lambda answer: _content(answer, "thinking", "thinking"),
        _event("content_block_delta", "delta", "thinking"),
    ),
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_answer_and_its_stream_are_the_same(api: Api, name: str) -> None:
    endpoint = ENDPOINTS[name]
    text = endpoint.text(api.post(endpoint.path, **endpoint.body))
    events = api.events(endpoint.path, **endpoint.body)
    pieces = [piece for event in events if (piece := endpoint.piece(event))]
    assert text
    assert "".join(pieces) == text
    assert len(pieces) > 5, "the stream came in few pieces"


def test_endpoints_agree_on_the_answer(api: Api) -> None:
    """The same conversation reaches the model as the same tokens, whichever API brings it."""
    answers = {name: ENDPOINTS[name] for name in ("chat", "responses", "messages")}
    texts = {name: endpoint.text(api.post(endpoint.path, **endpoint.body)) for name, endpoint in answers.items()}
    assert len(set(texts.values())) == 1, texts
