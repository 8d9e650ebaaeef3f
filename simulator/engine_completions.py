"""Answers of the mock engine in the forms of the completions API and of vLLM's generation by token ids."""

from __future__ import annotations

import time
from typing import Any

from deepinfer_simulator import engine_tokens as tokens
from deepinfer_simulator.engine_answers import DONE, Choice, Usage, event, usage_json
from deepinfer_simulator.engine_requests import Job


class CompletionAnswer:
    """Of the completions API: choice i answers prompt i // n."""

    def __init__(self, job: Job, request_id: str) -> None:
        self.job = job
        self._frame = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": job.model,
        }
        self._started: set[int] = set()

    def head(self) -> bytes:
        return b""

    def token(self, index: int, ids: list[int], finish: str | None) -> bytes:
        choice = self._choice(index, ids, finish, index not in self._started)
        self._started.add(index)
        return event({**self._frame, "choices": [choice]})

    def tail(self, usage: Usage, kv: dict[str, Any] | None) -> bytes:
        if not self.job.include_usage:
            return DONE
        return event({**self._frame, "choices": [], "usage": usage_json(usage)}) + DONE

    def whole(self, choices: list[Choice], usage: Usage, kv: dict[str, Any] | None) -> dict[str, Any]:
        found = [self._choice(index, choice.ids, choice.finish, True) for index, choice in enumerate(choices)]
        return {**self._frame, "choices": found, "usage": usage_json(usage), "kv_transfer_params": kv}

    def _choice(self, index: int, ids: list[int], finish: str | None, first: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "text": tokens.decode(ids), "logprobs": None, "finish_reason": finish}
        if self.job.return_token_ids:
            found["token_ids"] = ids
            if first:
                found["prompt_token_ids"] = self.job.prompts[index // self.job.n]
        return found


class GenerateAnswer:
    """Of /inference/v1/generate: tokens in, tokens out; text too, where asked (`output_mode`)."""

    def __init__(self, job: Job, request_id: str) -> None:
        self.job = job
        self._frame: dict[str, Any] = {"request_id": request_id, "output_mode": job.output_mode}
        self._first = job.return_token_ids

    def head(self) -> bytes:
        return b""

    def token(self, index: int, ids: list[int], finish: str | None) -> bytes:
        prompt = {"prompt_token_ids": self.job.prompts[0]} if self._first else {}
        self._first = False
        return event({**self._frame, **prompt, "choices": [self._choice(index, ids, finish)]})

    def tail(self, usage: Usage, kv: dict[str, Any] | None) -> bytes:
        if not self.job.include_usage:
            return DONE
        return event({**self._frame, "choices": [], "usage": usage_json(usage)}) + DONE

    def whole(self, choices: list[Choice], usage: Usage, kv: dict[str, Any] | None) -> dict[str, Any]:
        prompt = {"prompt_token_ids": self.job.prompts[0]} if self.job.return_token_ids else {}
        return {
            **self._frame,
            **prompt,
            "model": self.job.model,
            "choices": [self._choice(index, choice.ids, choice.finish) for index, choice in enumerate(choices)],
            "usage": usage_json(usage),
            "kv_transfer_params": kv,
        }

    def _choice(self, index: int, ids: list[int], finish: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "token_ids": ids, "finish_reason": finish}
        if self.job.output_mode == "text":
            found["text"] = tokens.decode(ids)
        return found
