"""A stream cut anywhere and resumed elsewhere is, for its client, the stream that was never cut."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_stream import VOCABULARY, pieces, stream, told

from deepinfer_router.api import Kind
from deepinfer_router.resume import held_after_tail, held_back, resumed_changes, why_not_now
from deepinfer_router.sse_payload import written
from deepinfer_router.transcript import Transcript

TEXT_KINDS = [Kind.CHAT, Kind.COMPLETION]
PROMPT = [5, 6, 7]


def whole_text(ids: list[int]) -> list[int]:
    """`ids` without an end in the middle of a character, which no engine could tell."""
    while ids and pieces(ids)[-1] == "" and VOCABULARY[ids[-1]]:
        ids = ids[:-1]
    return ids


answers = st.lists(st.sampled_from([0, 1, 5, 6, 9, (2, 3, 4), (7, 8)]), min_size=1, max_size=12).map(
    lambda parts: [token for part in parts for token in (part if isinstance(part, tuple) else (part,))]
)


@given(st.sampled_from(TEXT_KINDS), answers, st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_cut_anywhere_the_client_has_the_whole_once(kind: Kind, ids: list[int], cuts: list[int]) -> None:
    transcript = Transcript(kind, shows_ids=False)
    got: list[bytes] = []
    events = stream(kind, PROMPT, ids, with_ids=True)
    for number, cut in enumerate(cuts):
        got += [transcript.forward(event) for event in events[: min(cut, len(events))]]
        if transcript.done or transcript.finished:
            break
        if why_not_now(kind, transcript, shows_ids=False):  # nothing was told yet: this is a reroute, not a resume
            assert told(got)[0] == ""
            return
        transcript.rewind()
        asked = resumed_changes(kind, {"max_tokens": 100}, transcript, 100)
        prompt = asked["prompt"] if kind is Kind.COMPLETION else asked["kv_transfer_params"]["prompt_token_ids"]
        done = len(prompt) - len(PROMPT)
        assert prompt == PROMPT + ids[:done]
        assert asked["max_tokens"] == 100 - done
        events = stream(kind, prompt, ids[done:], with_ids=True, name=f"other-{number}", created=9)
    else:
        got += [transcript.forward(event) for event in events]
    if not transcript.done:
        got.append(transcript.ending(include_usage=True))
    text, usages, done = told(got)
    assert text == told(stream(kind, PROMPT, ids, with_ids=False))[0]
    assert [(u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) for u in usages] == [
        (len(PROMPT), len(ids), len(PROMPT) + len(ids))
    ]
    assert done
    chunks = [orjson.loads(event[6:]) for event in b"".join(got).split(b"\n\n")[:-1] if event != b"data: [DONE]"]
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {("x-1", 1)}
    assert sum("role" in choice.get("delta", {}) for chunk in chunks for choice in chunk["choices"]) == (
        kind is Kind.CHAT
    )


@given(st.sampled_from(TEXT_KINDS), answers)
def test_without_a_failure_the_client_has_what_it_would_have_had(kind: Kind, ids: list[int]) -> None:
    transcript = Transcript(kind, shows_ids=False)
    got = b"".join(transcript.forward(event) for event in stream(kind, PROMPT, ids, with_ids=True))
    assert got == b"".join(stream(kind, PROMPT, ids, with_ids=False))
    assert (transcript.prompt_ids, transcript.ids) == (PROMPT, ids)


@given(answers)
def test_a_client_that_asked_for_ids_gets_them(ids: list[int]) -> None:
    transcript = Transcript(Kind.COMPLETION, shows_ids=True)
    events = stream(Kind.COMPLETION, PROMPT, ids, with_ids=True)
    assert [transcript.forward(event) for event in events] == events


def test_ids_whose_text_the_client_lacks_are_not_taken_back() -> None:
    transcript = Transcript(Kind.COMPLETION, shows_ids=True)
    for event in stream(Kind.COMPLETION, PROMPT, [0, 2, 3, 4], with_ids=True)[:3]:
        transcript.forward(event)
    assert why_not_now(Kind.COMPLETION, transcript, shows_ids=True) == "ids_without_text"


@given(st.lists(st.integers(0, 99), min_size=2, max_size=9), st.data())
def test_token_ids_alone_are_resumed_too(ids: list[int], data: st.DataObject) -> None:
    def events(begin: int) -> list[bytes]:
        return [
            b"data: " + orjson.dumps({"request_id": "g", "choices": [{"index": 0, "token_ids": [token]}]}) + b"\n\n"
            for token in ids[begin:]
        ]

    transcript = Transcript(Kind.GENERATE, shows_ids=True, prompt_ids=PROMPT)
    cut = data.draw(st.integers(0, len(ids)))
    got = [transcript.forward(event) for event in events(0)[:cut]]
    transcript.rewind()
    asked = resumed_changes(Kind.GENERATE, {"sampling_params": {"max_tokens": 20, "min_tokens": 3}}, transcript, 20)
    assert asked["token_ids"] == PROMPT + ids[:cut]
    assert asked["sampling_params"] == {"max_tokens": 20 - cut, "min_tokens": max(0, 3 - cut)}
    got += [transcript.forward(event) for event in events(cut)]
    assert [t for event in got for t in orjson.loads(event[6:])["choices"][0]["token_ids"]] == ids


def test_an_engine_that_says_it_is_dead_has_failed() -> None:
    transcript = Transcript(Kind.CHAT, shows_ids=False)
    assert transcript.forward(b'data: {"error":{"message":"EngineCore","code":500}}\n\n') == b""
    assert transcript.failed


def test_white_space_that_a_reasoning_parser_held_is_given_where_reasoning_goes_on() -> None:
    def delta(**said: str) -> bytes:
        return b"data: " + orjson.dumps({"choices": [{"delta": said, "token_ids": [1]}]}) + b"\n\n"

    for later, expected in (({"reasoning": "more"}, "\n\nmore"), ({"content": "answer"}, "answer")):
        transcript = Transcript(Kind.CHAT, shows_ids=False, prompt_ids=[1])
        transcript.forward(delta(reasoning="think."))
        transcript.rewind()
        transcript.held = "\n\n"
        told_now = orjson.loads(transcript.forward(delta(**later))[6:])["choices"][0]["delta"]
        assert list(told_now.values()) == [expected]
        assert transcript.held == ""


@pytest.mark.parametrize(("cut", "reported", "expected"), [(1, 2, 3), (2, 1, 3), (3, 0, 3), (4, 2, 3), (5, 1, 3)])
def test_reasoning_tokens_of_both_engines_are_counted(cut: int, reported: int, expected: int) -> None:
    """Three of reasoning, two of content. `reported`: by an engine that takes what it begins with for reasoning."""
    transcript = Transcript(Kind.CHAT, shows_ids=False, prompt_ids=[1])
    for number, said in enumerate(["reasoning"] * 3 + ["content"] * 2):
        if number == cut:
            transcript.rewind()
        transcript.forward(written({"choices": [{"delta": {said: "x"}, "token_ids": [number]}]}))
    if cut == 5:
        transcript.rewind()
    usage = {"completion_tokens": 5 - cut, "completion_tokens_details": {"reasoning_tokens": reported}}
    (event,) = [transcript.forward(written({"choices": [], "usage": usage}))]
    told_usage = orjson.loads(event[6:])["usage"]
    assert told_usage["completion_tokens"] == 5
    assert told_usage["completion_tokens_details"] == {"reasoning_tokens": expected}


@pytest.mark.parametrize(
    ("raw", "reasoning", "content", "held"),
    [
        ("answer", "", "answer", ""),
        (" answer", "", "answer", ""),
        ("answer", "", " answer", ""),
        ("answer<", "", "answer", None),
        ("answer\n", "", "answer", None),
        ("think", "think", "", ""),
        ("think\n\n", "think", "", "\n\n"),
        ("think</th", "think", "", None),
        ("think\n</think>\n\nanswer", "think", "answer", ""),
        ("think</think>answer</", "think", "answer", None),
        ("think</think>aa", "think", "a", None),
        ("<think>think", "think", "", None),
        ("", "", "", ""),
    ],
)
def test_what_a_parser_held_back(raw: str, reasoning: str, content: str, held: str | None) -> None:
    assert held_back(raw, reasoning, content) == held


@pytest.mark.parametrize(
    ("rest", "reasoning", "held"), [("", False, ""), ("<", False, None), ("\n", False, None), ("\n", True, "\n")]
)
def test_what_a_parser_held_back_at_the_end_of_a_long_answer(rest: str, reasoning: bool, held: str | None) -> None:
    tail = "forty characters, of which none repeats all."
    assert held_after_tail(tail + rest, tail, reasoning) == held
    assert held_after_tail("another" + tail, tail, reasoning) is None
    assert held_after_tail("short", "short", reasoning) is None
    assert held_after_tail("ab" * 30, "ab" * 30, reasoning) is None  # could be held at both ends


def test_the_tail_of_an_answer_is_of_one_kind() -> None:
    transcript = Transcript(Kind.CHAT, shows_ids=False, prompt_ids=[1])
    for number, (said, text) in enumerate(
        [("reasoning", "abc"), ("reasoning", "de"), ("content", "f"), ("content", "gh")]
    ):
        transcript.forward(written({"choices": [{"delta": {said: text}, "token_ids": [number]}]}))
        if number == 1:
            assert transcript.tail(2) == (1, "de", True)
            assert transcript.tail(4) is None  # what was held before its first event is not known
    assert transcript.tail(2) == (3, "gh", False)
    assert transcript.tail(3) is None
    assert transcript.said() == ("abcde", "fgh")
