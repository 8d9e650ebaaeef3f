"""What an engine says of a request's tokens, found without parsing, is what parsing finds."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_router.usage import Usage, find_usage, with_cached
from deepinfer_router.verdict import Verdict, verdict

counts = st.integers(0, 10**9)
texts = st.text() | st.just('"usage": {"prompt_tokens": 7}') | st.just("cached_tokens")


@st.composite
def usages(draw: st.DrawFn) -> tuple[dict[str, Any], Usage]:
    """As one of the APIs writes it."""
    prompt, answer, cached = draw(counts), draw(counts), draw(counts)
    openai = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
    responses = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": answer}
    anthropic = {"input_tokens": prompt, "cache_read_input_tokens": cached, "output_tokens": answer}
    embedding = {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0, "prompt_tokens_details": None}
    detailed = openai | {"prompt_tokens_details": {"cached_tokens": cached}}
    said = draw(st.sampled_from([openai, detailed, responses, anthropic, embedding]))
    return said, Usage(prompt, said.get("completion_tokens", said.get("output_tokens", 0)))


@given(usages(), texts, texts)
def test_it_is_what_parsing_finds(usage: tuple[dict[str, Any], Usage], text: str, after: str) -> None:
    said, expected = usage
    body = {"choices": [{"message": {"content": text}}], "usage": said, "service_tier": after}
    assert find_usage(orjson.dumps(body)) == expected
    event = b"data: " + orjson.dumps({"choices": [], "usage": said}) + b"\n\ndata: [DONE]\n\n"
    assert find_usage(event) == expected


@given(texts)
def test_there_may_be_none(text: str) -> None:
    assert find_usage(orjson.dumps({"choices": [{"text": text}], "usage": None})) is None
    assert find_usage(orjson.dumps({"choices": [{"text": text}]})) is None
    assert find_usage(b"") is None


@given(usages(), texts, counts)
def test_only_the_cached_tokens_change(usage: tuple[dict[str, Any], Usage], text: str, cached: int) -> None:
    said, _ = usage
    body = {"choices": [{"message": {"content": text}}], "usage": said}
    changed = orjson.loads(with_cached(orjson.dumps(body), cached))
    for details in ("prompt_tokens_details", "input_tokens_details"):
        if said.get(details):
            said = {**said, details: {"cached_tokens": cached}}
    assert changed == {**body, "usage": said}
    assert with_cached(b"no usage", cached) == b"no usage"


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((200, 201, 204, 302), Verdict.SERVED),
        ((400, 401, 404, 408, 413, 422), Verdict.REJECTED),
        ((429, 503), Verdict.PRESSURE),
        ((500, 501, 502, 504, 507), Verdict.FAULT),
    ],
)
def test_what_a_status_says_of_an_engine(statuses: tuple[int, ...], expected: Verdict) -> None:
    """sglang#25811: 4xx opened circuits; sglang#39464: 503 counted as death."""
    assert {verdict(status) for status in statuses} == {expected}
