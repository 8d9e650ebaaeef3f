"""Answers of the mock engine in the form of the responses API."""

from __future__ import annotations

import time
from typing import Any

import orjson

from deepinfer_simulator import engine_tokens as tokens
from deepinfer_simulator.engine_answers import Choice, Usage
from deepinfer_simulator.engine_requests import Job


class ResponsesAnswer:
    """One output item: a message, or the call of a function."""

    def __init__(self, job: Job, request_id: str) -> None:
        self.job = job
        self.id = f"resp_{request_id}"
        self._created = int(time.time())
        self._number = 0
        self._text = ""
        self._finish = "length"

    def head(self) -> bytes:
        started = {"response": self._response([], "in_progress", None)}
        found = self._event("response.created", started) + self._event("response.in_progress", started)
        found += self._event("response.output_item.added", {"output_index": 0, "item": self._item("", "in_progress")})
        if not self.job.tool:
            found += self._event("response.content_part.added", {**self._place, "content_index": 0, "part": _part("")})
        return found

    def token(self, index: int, ids: list[int], finish: str | None) -> bytes:
        self._finish = finish or self._finish
        text = tokens.decode(ids)
        self._text += text
        if self.job.tool:
            return self._event("response.function_call_arguments.delta", {**self._place, "delta": text})
        return self._event(
            "response.output_text.delta", {**self._place, "content_index": 0, "delta": text, "logprobs": []}
        )

    def tail(self, usage: Usage, kv: dict[str, Any] | None) -> bytes:
        item = self._item(self._text, "completed")
        if self.job.tool:
            done = {**self._place, "name": self.job.tool["name"], "arguments": self._text}
            found = self._event("response.function_call_arguments.done", done)
        else:
            done = {**self._place, "content_index": 0}
            found = self._event("response.output_text.done", {**done, "text": self._text, "logprobs": []})
            found += self._event("response.content_part.done", {**done, "part": _part(self._text)})
        found += self._event("response.output_item.done", {"output_index": 0, "item": item})
        kind, response = self._last(item, self._finish, usage)
        return found + self._event(f"response.{kind}", {"response": response})

    def whole(self, choices: list[Choice], usage: Usage, kv: dict[str, Any] | None) -> dict[str, Any]:
        (choice,) = choices
        found = self._last(self._item(tokens.decode(choice.ids), "completed"), choice.finish, usage)[1]
        return {**found, "kv_transfer_params": kv} if kv else found

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": f"item_{self.id}", "output_index": 0}

    def _last(self, item: Any, finish: str, usage: Usage) -> tuple[str, dict[str, Any]]:
        status = "incomplete" if finish == "length" else "completed"
        return status, self._response([item], status, usage)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": f"item_{self.id}", "status": status}
        if self.job.tool:
            call = {"type": "function_call", "call_id": f"call_{self.id}", "name": self.job.tool["name"]}
            return {**item, **call, "arguments": text}
        content = [_part(text)] if status == "completed" else []
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _response(self, output: list[Any], status: str, usage: Usage | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self.job.model,
            "output": output,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage
            and {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.output,
            },
        }

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(numbered))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
