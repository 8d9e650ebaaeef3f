"""Answers of the mock engine in the form of the Anthropic messages API."""

from __future__ import annotations

from typing import Any

import orjson

from deepinfer_simulator import engine_tokens as tokens
from deepinfer_simulator.engine_answers import Choice, Usage
from deepinfer_simulator.engine_requests import Job

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}


class MessagesAnswer:
    """One content block: text, or the call of a tool."""

    def __init__(self, job: Job, request_id: str) -> None:
        self.job = job
        self.id = f"msg_{request_id}"
        self._finish = "length"

    def head(self) -> bytes:
        message = self._message([], None, Usage(sum(map(len, self.job.prompts)), 0, 0))
        return _event("message_start", {"message": message}) + _event(
            "content_block_start", {"index": 0, "content_block": self._block("")}
        )

    def token(self, index: int, ids: list[int], finish: str | None) -> bytes:
        self._finish = finish or self._finish
        text = tokens.decode(ids)
        delta = (
            {"type": "input_json_delta", "partial_json": text}
            if self.job.tool
            else {"type": "text_delta", "text": text}
        )
        return _event("content_block_delta", {"index": 0, "delta": delta})

    def tail(self, usage: Usage, kv: dict[str, Any] | None) -> bytes:
        stop = {"stop_reason": _STOP_REASONS[self._finish], "stop_sequence": None}
        return (
            _event("content_block_stop", {"index": 0})
            + _event("message_delta", {"delta": stop, "usage": _usage(usage)})
            + _event("message_stop", {})
        )

    def whole(self, choices: list[Choice], usage: Usage, kv: dict[str, Any] | None) -> dict[str, Any]:
        (choice,) = choices
        found = self._message([self._block(tokens.decode(choice.ids))], _STOP_REASONS[choice.finish], usage)
        return {**found, "kv_transfer_params": kv} if kv else found

    def _block(self, text: str) -> dict[str, Any]:
        if self.job.tool:
            called = {"type": "tool_use", "id": f"toolu_{self.id}", "name": self.job.tool["name"]}
            return {**called, "input": orjson.loads(text) if text else {}}
        return {"type": "text", "text": text}

    def _message(self, content: list[Any], stop_reason: str | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.job.model,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **data}))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "output_tokens": usage.output,
        "cache_read_input_tokens": usage.cached,
    }
