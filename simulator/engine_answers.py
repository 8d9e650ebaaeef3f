"""Answers of the mock engine in the forms of the chat API, and what all answers share."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import orjson

from deepinfer_simulator import engine_tokens as tokens
from deepinfer_simulator.engine_requests import Job

DONE = b"data: [DONE]\n\n"


class Choice(NamedTuple):
    """One finished answer."""

    ids: list[int]
    """Without the end of sequence."""
    finish: str
    """length, stop or tool_calls."""


class Usage(NamedTuple):
    """Tokens of a request."""

    prompt: int
    cached: int
    output: int


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % orjson.dumps(data)


def usage_json(usage: Usage) -> dict[str, Any]:
    """As vLLM with --enable-prompt-tokens-details."""
    return {
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt + usage.output,
        "completion_tokens": usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


class Answer(Protocol):
    """One for each request: its events, or its whole."""

    def head(self) -> bytes:
        """Events before any token."""

    def token(self, index: int, ids: list[int], finish: str | None) -> bytes:
        """The event of one token of a choice, which may be the last; `ids` is empty when an end of sequence came."""

    def tail(self, usage: Usage, kv: dict[str, Any] | None) -> bytes:
        """Events after the last token."""

    def whole(self, choices: list[Choice], usage: Usage, kv: dict[str, Any] | None) -> dict[str, Any]:
        """The answer without streaming."""


class ChatAnswer:
    """Of the chat API."""

    def __init__(self, job: Job, request_id: str) -> None:
        self.job = job
        self.id = f"chatcmpl-{request_id}"
        self.created = int(time.time())
        self._started: set[int] = set()
        self._called: set[int] = set()

    def head(self) -> bytes:
        first = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._event(index, first) for index in range(self.job.n))

    def token(self, index: int, ids: list[int], finish: str | None) -> bytes:
        choice: dict[str, Any] = {"delta": self._delta(index, tokens.decode(ids)), "finish_reason": finish}
        if self.job.logprobs:
            choice["logprobs"] = self._logprobs(ids)
        if self.job.return_token_ids:
            choice["token_ids"] = ids
        return self._event(index, choice)

    def tail(self, usage: Usage, kv: dict[str, Any] | None) -> bytes:
        if not self.job.include_usage:
            return DONE
        return event({**self._frame("chat.completion.chunk"), "choices": [], "usage": usage_json(usage)}) + DONE

    def whole(self, choices: list[Choice], usage: Usage, kv: dict[str, Any] | None) -> dict[str, Any]:
        found = {
            **self._frame("chat.completion"),
            "choices": [self._whole(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_json(usage),
            "kv_transfer_params": kv,
        }
        if self.job.return_token_ids:
            found["prompt_token_ids"] = self.job.prompts[0]
        return found

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.job.model}

    def _event(self, index: int, choice: dict[str, Any]) -> bytes:
        data = {**self._frame("chat.completion.chunk"), "choices": [{"index": index, "finish_reason": None, **choice}]}
        if self.job.return_token_ids and index not in self._started:
            data["prompt_token_ids"] = self.job.prompts[0]
        self._started.add(index)
        return event(data)

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        if not self.job.tool:
            return {"content": text}
        call: dict[str, Any] = {"index": 0, "function": {"arguments": text}}
        if index not in self._called:
            self._called.add(index)
            call |= {"id": f"call_{self.id}_{index}", "type": "function"}
            call["function"]["name"] = self.job.tool["name"]
        return {"tool_calls": [call]}

    def _logprobs(self, ids: list[int]) -> dict[str, Any]:
        return {
            "content": [
                {"token": tokens.decode([one]), "logprob": -0.5, "bytes": [one], "top_logprobs": []} for one in ids
            ]
        }

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        text = tokens.decode(choice.ids)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.job.tool:
            function = {"name": self.job.tool["name"], "arguments": text}
            message |= {
                "content": None,
                "tool_calls": [{"id": f"call_{self.id}_{index}", "type": "function", "function": function}],
            }
        found = {"index": index, "message": message, "finish_reason": choice.finish}
        if self.job.logprobs:
            found["logprobs"] = self._logprobs(choice.ids)
        if self.job.return_token_ids:
            found["token_ids"] = choice.ids
        return found
