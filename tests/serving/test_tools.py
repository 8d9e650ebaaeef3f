"""`--tool-call-parser deepseek_v41`: calls in V4.1's form come back as calls.

Random weights never call a tool of their own accord, so a grammar makes them: vLLM's own for a required or named tool,
one of ours where the model may choose. The parser reads the text either way.
"""

import json

import pytest
from tokenizers import Tokenizer

from serving.client import NO_THINKING, Api, Json, user

CITIES = ["Berlin", "Hangzhou"]
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": CITIES},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = [user("How is the weather?")]
CALL_GRAMMAR = r"""
root ::= "\n\n<｜DSML｜ calls>\n" call "</｜DSML｜ calls>"
call ::= "<｜DSML｜ invoke name=\"get_weather\">\n" city days "</｜DSML｜ invoke>\n"
city ::= "<｜DSML｜ parameter name=\"city\" string=\"true\">" ("Berlin" | "Hangzhou") "</｜DSML｜ parameter>\n"
days ::= "<｜DSML｜ parameter name=\"days\" string=\"false\">" [1-9] "</｜DSML｜ parameter>\n"
"""


def check(call: Json) -> Json:
    """The arguments of a call, after checking them against the tool's schema."""
    assert call["name"] == "get_weather"
    arguments = json.loads(call["arguments"])
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in CITIES
    assert arguments["days"] in range(1, 10)
    return arguments


@pytest.fixture(scope="module")
def ask(tokenizer: Tokenizer) -> Json:
    """A request with a tool. The form of a call allows white space without end: a bias keeps the answers short."""
    blanks = [i for i in range(tokenizer.get_vocab_size()) if tokenizer.decode([i]).isspace()]
    return {
        "messages": QUESTION,
        "tools": [WEATHER],
        "parallel_tool_calls": False,
        "max_tokens": 400,
        "chat_template_kwargs": NO_THINKING,
        "logit_bias": {str(token): -50 for token in blanks},
    }


@pytest.fixture(scope="module")
def required(api: Api, ask: Json) -> Json:
    """The answer to a request that requires a call."""
    return api.post("/v1/chat/completions", **ask, tool_choice="required", return_token_ids=True)["choices"][0]


def test_required_call_follows_the_schema(tokenizer: Tokenizer, required: Json) -> None:
    [call] = required["message"]["tool_calls"]
    arguments = check(call["function"])
    raw = tokenizer.decode(required["token_ids"], skip_special_tokens=False)
    assert raw.lstrip().startswith('<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">'), raw
    assert f'<｜DSML｜ parameter name="city" string="true">{arguments["city"]}</｜DSML｜ parameter>' in raw
    assert required["finish_reason"] == "tool_calls"
    assert not required["message"]["content"]


def test_streamed_call_is_the_same(api: Api, ask: Json, required: Json) -> None:
    events = api.events("/v1/chat/completions", **ask, tool_choice="required")
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls") or []]
    names = [call["function"]["name"] for call in deltas if call["function"].get("name")]
    assert names == ["get_weather"]
    arguments = "".join(call["function"].get("arguments") or "" for call in deltas)
    assert json.loads(arguments) == json.loads(required["message"]["tool_calls"][0]["function"]["arguments"])
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_named_call_follows_the_schema(api: Api, ask: Json) -> None:
    answer = api.post("/v1/chat/completions", **ask, tool_choice=NAMED)["choices"][0]
    [call] = answer["message"]["tool_calls"]
    check(call["function"])


def test_required_call_over_the_messages_api(api: Api) -> None:
    function = WEATHER["function"]
    answer = api.post(
        "/v1/messages",
        messages=QUESTION,
        max_tokens=400,
        thinking={"type": "disabled"},
        tools=[{"name": function["name"], "input_schema": function["parameters"], "strict": True}],
        tool_choice={"type": "tool", "name": function["name"]},
    )
    [use] = [part for part in answer["content"] if part["type"] == "tool_use"]
    check({"name": use["name"], "arguments": json.dumps(use["input"])})
    assert answer["stop_reason"] == "tool_use"


def test_call_of_the_models_own_choice(api: Api, ask: Json) -> None:
    answer = api.post(
        "/v1/chat/completions", **ask, tool_choice="auto", structured_outputs={"grammar": CALL_GRAMMAR.strip()}
    )["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    check(answer["message"]["tool_calls"][0]["function"])


def test_without_a_call_the_text_is_the_answer(api: Api, ask: Json) -> None:
    answer = api.post("/v1/chat/completions", **{**ask, "max_tokens": 12}, tool_choice="none")["choices"][0]
    assert answer["message"]["content"]
    assert not answer["message"].get("tool_calls")
