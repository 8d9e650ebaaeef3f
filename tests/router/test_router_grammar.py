"""What answers must look like: read before an engine is asked, in bounded time, refused only where engines refuse."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvloop
from exchanges import chat, received

from deepinfer_router import grammar
from deepinfer_router.api import CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES, Api
from deepinfer_router.entry import Entry
from deepinfer_router.entry_config import EntryConfig
from deepinfer_router.error_body import render
from deepinfer_router.errors import Refusal
from deepinfer_router.grammar_config import GrammarConfig
from deepinfer_router.grammar_form import Form, form_of
from deepinfer_router.grammar_process import GrammarProcess
from deepinfer_router.grammar_verdict import verdict

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TEXT = orjson.dumps(SCHEMA).decode()
CANNOT = {"type": "object", "properties": {"a": {"type": "text"}}}
GRAMMAR = 'root ::= "a"'
REGEX = {"regex": "a"}
ENDLESS = {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}


def as_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def entry(**config: Any) -> Entry:
    return Entry(EntryConfig(grammar=GrammarConfig(**{"compile_s": 20.0, "wait_s": 30.0, **config})))


def preparing(made: Entry, asked: dict[str, Any]) -> "asyncio.Task[None]":
    request = made.read(received("/v1/chat/completions", chat(structured_outputs=asked)))
    return asyncio.create_task(made.prepare(request))


def check(fields: dict[str, Any], route: str = "/v1/chat/completions", **config: Any) -> None:
    async def run() -> None:
        made = entry(**config)
        try:
            await made.prepare(made.read(received(route, fields)))
        finally:
            await made.close()

    uvloop.run(run())  # the loop that the router runs on


def refusal(fields: dict[str, Any], route: str = "/v1/chat/completions", **config: Any) -> Refusal:
    with pytest.raises(Refusal) as refused:
        check(fields, route, **config)
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize(
    ("api", "fields", "form"),
    [
        (CHAT, {}, None),
        (CHAT, {"response_format": {"type": "text"}}, None),
        (CHAT, {"response_format": {"type": "json_object"}}, None),
        (CHAT, {"response_format": as_format(SCHEMA)}, Form("json", TEXT, "response_format")),
        (COMPLETION, {"response_format": as_format(SCHEMA)}, Form("json", TEXT, "response_format")),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
            Form("json", TEXT, "text.format"),
        ),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            Form("json", TEXT, "output_config.format"),
        ),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}, Form("json", TEXT, "structured_outputs.json")),
        (CHAT, {"structured_outputs": {"json": TEXT}}, Form("json", TEXT, "structured_outputs.json")),
        (CHAT, {"structured_outputs": {"regex": "a+"}}, Form("regex", "a+", "structured_outputs.regex")),
        (
            CHAT,
            {"structured_outputs": {"grammar": GRAMMAR}},
            Form("grammar", GRAMMAR, "structured_outputs.grammar"),
        ),
        (CHAT, {"structured_outputs": {"choice": ["a"]}}, None),
        (
            GENERATE,
            {"sampling_params": {"structured_outputs": {"regex": "a"}}},
            Form("regex", "a", "structured_outputs.regex"),
        ),
        # vLLM has the response format decide
        (
            CHAT,
            {"structured_outputs": REGEX, "response_format": as_format(SCHEMA)},
            Form("json", TEXT, "response_format"),
        ),
    ],
)
def test_where_each_api_says_it(api: Api, fields: dict[str, Any], form: Form | None) -> None:
    assert form_of(api, fields) == form


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"json": " "}, "is empty"),
        ({"json": "{"}, "is no JSON"),
        ({"regex": "a\0"}, "NUL"),
        ({"grammar": " "}, "is empty"),
        ({"choice": []}, "is empty"),
        ({"json_object": False}, "is false"),
    ],
)
def test_what_no_engine_takes(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        form_of(CHAT, {"structured_outputs": asked})


def test_nesting_is_bounded_as_in_vllm() -> None:
    def nested(depth: int) -> dict[str, Any]:
        return {} if depth == 1 else {"not": nested(depth - 1)}

    assert form_of(CHAT, {"structured_outputs": {"json": nested(64)}})
    with pytest.raises(Refusal, match="more than 64 deep"):
        form_of(CHAT, {"structured_outputs": {"json": nested(66)}})


@pytest.mark.parametrize(
    ("kind", "text", "auto", "guidance"),
    [
        ("json", TEXT, "ok", "ok"),
        ("json", '{"type": "foo"}', "refused", "refused"),
        ("json", '{"type": "object", "properties": {"a": {"type": "foo"}}}', "refused", "refused"),
        ("json", '{"$ref": "#/$defs/x"}', "refused", "refused"),
        ("json", "[]", "refused", "refused"),
        ("json", '{"not": {}}', "unread", "refused"),  # xgrammar reads it
        ("json", '{"type": "string", "format": "foo"}', "unread", "refused"),
        ("json", '{"const": 1, "type": "foo"}', "unread", "refused"),
        ("json", '{"type": "foo", "patternProperties": {}}', "unread", "refused"),  # outlines may
        ("regex", "[a-z]+", "ok", "ok"),
        ("regex", "(", "refused", "refused"),
        ("regex", "(?=a)b", "refused", "refused"),
        ("regex", "[^]", "unread", "refused"),
        ("regex", r"[\1]", "unread", "refused"),
        ("regex", "[^](])", "unread", "refused"),  # two classes, or one and a group
        ("regex", r"\q", "unread", "refused"),
        ("grammar", 'root ::= "a" b\nb ::= "c"', "ok", "ok"),
        ("grammar", 'start: "a"', "ok", "ok"),
        ("grammar", "root ::= b", "refused", "refused"),
        ("grammar", 'a ::= "b"', "refused", "refused"),
        ("grammar", "root ::= 'a'", "unread", "refused"),
        ("grammar", 'root ::= TagDispatch(("a", b))\nb ::= "c"', "unread", "refused"),  # xgrammar's own
    ],
)
def test_verdicts(kind: str, text: str, auto: str, guidance: str) -> None:
    assert verdict(kind, text, "auto").word == auto
    assert verdict(kind, text, "guidance").word == guidance


def test_good_ones_pass_and_bad_ones_say_why() -> None:
    check(chat(response_format=as_format(SCHEMA)))
    refused = refusal(chat(response_format=as_format(CANNOT)))
    assert (refused.code, refused.param) == ("invalid_grammar", "response_format")
    assert refused.message == "response_format cannot be used: Invalid type: text"
    refused = refusal(chat(output_config={"format": {"type": "json_schema", "schema": CANNOT}}), "/v1/messages")
    assert orjson.loads(render(refused, MESSAGES)[2])["error"]["type"] == "invalid_request_error"
    check(chat(response_format=as_format({"not": {}})))
    assert refusal(chat(response_format=as_format({"not": {}})), backend="guidance").code == "invalid_grammar"


def test_switched_off() -> None:
    check(chat(response_format=as_format(CANNOT)), check=False)


def test_size_is_bounded() -> None:
    refused = refusal(chat(structured_outputs={"regex": "a" * 1000}), max_bytes=999)
    assert refused.code == "grammar_too_costly"
    assert "has 1000 characters, at most 999" in refused.message


def test_time_is_bounded() -> None:
    """A schema of forty bytes that takes minutes to read, and gigabytes."""
    refused = refusal(chat(response_format=as_format(ENDLESS)), compile_s=0.3)
    assert refused.code == "grammar_too_costly"
    assert "more than 0.3 s" in refused.message


def test_memory_is_bounded() -> None:
    refused = refusal(chat(response_format=as_format(ENDLESS)), compile_s=60.0, memory_bytes=1 << 29)
    assert refused.code == "grammar_too_costly"
    assert "memory" in refused.message


def test_after_a_costly_one_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[str]:
        grammars = grammar.Grammars(GrammarConfig(compile_s=0.3, wait_s=60.0))
        words = []
        for schema in (ENDLESS, SCHEMA, ENDLESS):
            monkeypatch.setattr(grammars._process, "_compile_s", 0.3 if schema is ENDLESS else 30.0)
            form = Form("json", orjson.dumps(schema).decode(), "p")
            words.append((await grammars._verdict(form)).word)
        await grammars.close()
        return words

    assert asyncio.run(run()) == ["costly", "ok", "costly"]


def test_each_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = GrammarProcess.ask

    async def counting(self: GrammarProcess, kind: str, text: str) -> Any:
        asked.append(text)
        return await ask(self, kind, text)

    monkeypatch.setattr(GrammarProcess, "ask", counting)

    async def run() -> None:
        made = entry(remembered=2)
        for regex in ("a", "a", "b", "a", "c", "a", "b"):
            fields = chat(structured_outputs={"regex": regex})
            requests = [made.read(received("/v1/chat/completions", fields)) for _ in range(3)]
            await asyncio.gather(*map(made.prepare, requests))
        await made.close()

    asyncio.run(run())
    assert asked == ["a", "b", "c", "b"]  # a was used between, so b went first


def test_of_a_client_that_leaves_others_may_wait() -> None:
    async def run() -> None:
        made = entry()
        first, second = (preparing(made, {"regex": "a" * 100}) for _ in "ab")
        await asyncio.sleep(0)
        first.cancel()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first
        await made.close()

    asyncio.run(run())


def test_who_waits_too_long_goes_unread() -> None:
    async def run() -> None:
        made = entry(compile_s=20.0, wait_s=0.05)
        slow = preparing(made, {"json": ENDLESS})
        await preparing(made, {"regex": "("})
        await slow
        await made.close()

    before = grammar.GRAMMARS.labels("busy").value
    asyncio.run(run())
    assert grammar.GRAMMARS.labels("busy").value == before + 2


def test_no_more_than_so_many_wait() -> None:
    async def run() -> list[str]:
        grammars = grammar.Grammars(GrammarConfig(compile_s=20.0, wait_s=0.05))
        forms = [Form("regex", f"a{{{number}}}", "p") for number in range(grammar.MAX_READING + 3)]
        slow = asyncio.create_task(grammars._verdict(Form("json", orjson.dumps(ENDLESS).decode(), "p")))
        await asyncio.sleep(0)
        verdicts = await asyncio.gather(*map(grammars._verdict, forms))
        assert len(grammars._reading) == grammar.MAX_READING
        await slow
        await grammars.close()
        return [verdict.word for verdict in verdicts]

    assert set(asyncio.run(run())) == {"busy"}


def test_a_process_that_is_killed_is_started_again() -> None:
    async def run() -> None:
        process = GrammarProcess("auto", 30.0, 1 << 31)
        assert (await process.ask("regex", "a")).word == "ok"
        assert process._process is not None
        killed = process._process
        os.kill(killed.pid, signal.SIGKILL)
        await killed.wait()
        assert [(await process.ask("regex", regex)).word for regex in ("b", "c")] == ["ok", "ok"]
        await process.close()
        await process.close()

    asyncio.run(run())


def test_without_a_process_the_engine_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    before = grammar.GRAMMARS.labels("unread").value
    check(chat(response_format=as_format(CANNOT)))
    assert grammar.GRAMMARS.labels("unread").value == before + 1


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_closing_leaves_no_process() -> None:
    async def run() -> int:
        made = entry()
        task = preparing(made, {"json": ENDLESS})
        assert made._grammars is not None
        while made._grammars._process._process is None:
            await asyncio.sleep(0.01)
        pid = made._grammars._process._process.pid
        await made.close()
        await asyncio.gather(task, return_exceptions=True)
        return pid

    pid = asyncio.run(run())
    end = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.01)
