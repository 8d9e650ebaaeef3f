"""Refusals in the form of each API."""

import orjson
import pytest

from deepinfer_router import api, error_body
from deepinfer_router.errors import Refusal


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "not_found_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (415, "invalid_request_error", "invalid_request_error"),
        (429, "rate_limit_error", "rate_limit_error"),
        (502, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
        (504, "server_error", "timeout_error"),
    ],
)
def test_whole_answers(status: int, openai: str, anthropic: str) -> None:
    refusal = Refusal(status, "a_word", 'said "so"', param="n")
    code, headers, body = error_body.render(refusal, api.CHAT)
    assert code == status
    assert dict(headers)[b"content-type"] == b"application/json"
    assert orjson.loads(body) == {"error": {"message": 'said "so"', "type": openai, "param": "n", "code": "a_word"}}
    assert orjson.loads(error_body.render(refusal, api.MESSAGES)[2]) == {
        "type": "error",
        "error": {"type": anthropic, "message": 'said "so"'},
    }


def test_retry_after_is_whole_seconds() -> None:
    for seconds, text in ((0.01, b"1"), (1.2, b"2"), (30.0, b"30")):
        assert (
            dict(error_body.render(Refusal(429, "c", "m", retry_after_s=seconds), api.CHAT)[1])[b"retry-after"] == text
        )
    assert b"retry-after" not in dict(error_body.render(Refusal(429, "c", "m"), api.CHAT)[1])


def test_events() -> None:
    name, data = b"", error_body.event(api.CHAT, "upstream_lost", "gone")
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and b"[DONE]" not in data
    assert orjson.loads(data[6:]) == {
        "error": {"message": "gone", "type": "upstream_lost", "param": None, "code": "upstream_lost"}
    }
    name, data = error_body.event(api.MESSAGES, "upstream_lost", "gone").split(b"\n", 1)
    assert name == b"event: error"
    assert orjson.loads(data[6:]) == {"type": "error", "error": {"type": "api_error", "message": "upstream_lost: gone"}}
    name, data = error_body.event(api.RESPONSES, "upstream_lost", "gone").split(b"\n", 1)
    assert name == b"event: error"
    assert orjson.loads(data[6:])["type"] == "error"
