"""A few lines around httpx: requests that must succeed or fail, and server-sent events."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

MODEL = "tiny"
NO_THINKING = {"thinking": False}

Json = dict[str, Any]


@dataclass(frozen=True)
class Api:
    """The server's HTTP API, with the model filled in and temperature 0 unless given."""

    http: httpx.Client

    def post(self, path: str, **body: Any) -> Json:
        """The answer to a request that must succeed."""
        answer = self.http.post(path, json=_filled(body))
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:2000]}"
        return answer.json()

    def chat(self, text: str, **body: Any) -> Json:
        """The first choice of a chat completion without thinking."""
        body = {"chat_template_kwargs": NO_THINKING, **body}
        return self.post("/v1/chat/completions", messages=[user(text)], **body)["choices"][0]

    def complete(self, prompt: str | list[int], **body: Any) -> Json:
        """The first choice of a completion."""
        return self.post("/v1/completions", prompt=prompt, **body)["choices"][0]

    def events(self, path: str, **body: Any) -> list[Json]:
        """The data of every server-sent event of a streamed answer, without the closing [DONE]."""
        with self.http.stream("POST", path, json=_filled({**body, "stream": True})) as answer:
            assert answer.status_code == 200, answer.read()[:2000]
            data = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        return [json.loads(item) for item in data if item != "[DONE]"]

    def refusal(self, path: str, **body: Any) -> tuple[int, str]:
        """Status and message of a request that must fail."""
        answer = self.http.post(path, json=_filled(body))
        assert answer.status_code >= 400, answer.text[:2000]
        return answer.status_code, answer.json()["error"]["message"]


def user(text: str) -> Json:
    """A message of the user."""
    return {"role": "user", "content": text}


def _filled(body: Json) -> Json:
    return {"model": MODEL, "temperature": 0, **body}
