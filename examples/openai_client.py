"""The official `openai` client against a running server: chat, stream, tools, JSON, logprobs, n and stop.

Checks the form of every answer, not its sense, so it also runs on a checkpoint of random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

NO_THINKING = {"chat_template_kwargs": {"thinking": False}}
HELLO = [{"role": "user", "content": "Say hello to the world."}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [1, 2, 3]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class Verdict(BaseModel):
    """What the JSON answer must parse as."""

    verdict: Literal["yes", "no"]
    sure: bool


def chat(client: OpenAI, model: str) -> str:
    """One answer."""
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_completion_tokens=16, temperature=0, extra_body=NO_THINKING
    )
    assert answer.choices[0].message.content
    assert answer.usage and answer.usage.completion_tokens <= 16
    return answer.choices[0].message.content


def stream(client: OpenAI, model: str) -> str:
    """The same answer in pieces."""
    chunks = client.chat.completions.create(
        model=model, messages=HELLO, max_completion_tokens=16, temperature=0, extra_body=NO_THINKING, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat(client, model), "the streamed answer differs from the whole one"
    return text


def tools(client: OpenAI, model: str) -> str:
    """A call that the model is required to make, with arguments that follow the tool's schema."""
    answer = client.chat.completions.create(
        model=model,
        messages=HELLO,
        tools=[ADD],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=400,
        temperature=0,
        extra_body=NO_THINKING,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls and calls[0].function.name == "add"
    arguments = json.loads(calls[0].function.arguments)
    assert arguments.keys() == {"a", "b"} and set(arguments.values()) <= {1, 2, 3}
    return f"add({arguments['a']}, {arguments['b']})"


def json_schema(client: OpenAI, model: str) -> str:
    """An answer that the client parses into a class."""
    answer = client.chat.completions.parse(
        model=model,
        messages=HELLO,
        response_format=Verdict,
        max_completion_tokens=200,
        temperature=0,
        extra_body=NO_THINKING,
    )
    assert answer.choices[0].message.parsed is not None
    return repr(answer.choices[0].message.parsed)


def logprobs(client: OpenAI, model: str) -> str:
    """The three most likely tokens at each place; the greedy one is the first."""
    answer = client.chat.completions.create(
        model=model,
        messages=HELLO,
        max_completion_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body=NO_THINKING,
    )
    places = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert places
    for place in places:
        likely = [token.logprob for token in place.top_logprobs]
        assert len(likely) == 3 and likely == sorted(likely, reverse=True) and likely[0] == place.logprob
    return " ".join(f"{place.logprob:.2f}" for place in places)


def n(client: OpenAI, model: str) -> str:
    """Two answers to one request."""
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_completion_tokens=16, n=2, temperature=1, seed=3, extra_body=NO_THINKING
    )
    texts = [choice.message.content for choice in answer.choices]
    assert len(texts) == 2 and texts[0] != texts[1]
    return f"{len(texts)} different answers"


def stop(client: OpenAI, model: str) -> str:
    """An answer ends before a stop string: here a piece of what it would otherwise say."""
    whole = client.completions.create(model=model, prompt="Hello", max_tokens=16, temperature=0).choices[0].text
    middle = next(i for i in range(len(whole) // 2, len(whole)) if whole[i].isalnum())
    word = whole[middle : middle + 2]
    answer = client.completions.create(model=model, prompt="Hello", max_tokens=16, temperature=0, stop=[word])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == whole[: whole.index(word)]
    return f"stopped before {word!r}"


CHECKS: tuple[Callable[[OpenAI, str], str], ...] = (chat, stream, tools, json_schema, logprobs, n, stop)


def main() -> int:
    """Run every check; 0 when all pass. A failing one raises."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python examples/openai_client.py --base-url http://127.0.0.1:8000/v1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="default http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    options = parser.parse_args()
    client = OpenAI(base_url=options.base_url, api_key="none", timeout=120, max_retries=0)
    model = options.model or client.models.list().data[0].id
    for check in CHECKS:
        print(f"{check.__name__:12} {check(client, model)!r}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
