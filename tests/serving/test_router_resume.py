"""The router goes on with streams of a real engine that are cut off: reasoning, content, ids and usage are whole."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tokenizers import Tokenizer

from deepinfer_router.app import App
from deepinfer_router.config import RouterConfig
from deepinfer_router.http_server import HttpServer
from deepinfer_vllm.server_process import ServerProcess
from serving.client import MODEL

MAX_TOKENS = 48


class Cutter:
    """A TCP proxy to one engine that breaks off the first streams, each after so many events.

    At the latest before the last: an engine puts several tokens into one event when it is not read in time. And not
    after tokens that have no text yet, half a character: a client that has seen their ids cannot be helped.
    """

    def __init__(self, url: str, after: list[int]) -> None:
        parts = urlsplit(url)
        self._engine = parts.hostname, parts.port
        self._after = after

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_engine, to_engine = await asyncio.open_connection(*self._engine)

        async def up() -> None:
            while data := await reader.read(1 << 16):
                to_engine.write(data)
            to_engine.close()

        going = asyncio.ensure_future(up())
        events = 0
        is_half = False
        while data := await from_engine.read(1 << 16):
            events += data.count(b"data: {")
            if self._after and ((events >= self._after[0] and not is_half) or b'"finish_reason":"' in data):
                del self._after[0]
                break
            writer.write(data)
            is_half = b'"text":""' in data.rpartition(b"data: {")[2]
        going.cancel()
        to_engine.close()
        writer.close()


async def streamed(url: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What a client has of a stream in the end."""
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": MAX_TOKENS, **fields}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    whole: dict[str, Any] = {"reasoning": "", "content": "", "ids": [], "finish": [], "done": False, "usage": None}
    async with httpx.AsyncClient(timeout=120) as http, http.stream("POST", url + path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                whole["done"] = True
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            whole["usage"] = event.get("usage") or whole["usage"]
            for choice in event["choices"]:
                delta = choice.get("delta", {})
                whole["reasoning"] += delta.get("reasoning") or ""
                whole["content"] += choice.get("text") or delta.get("content") or ""
                whole["ids"] += choice.get("token_ids") or []
                whole["finish"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
    whole["usage"].pop("prompt_tokens_details", None)
    return whole


async def resumed(url: str, path: str, fields: dict[str, Any], after: list[int]) -> tuple[dict[str, Any], list[int]]:
    """The same stream through a router before that engine, listed twice, whose connections break."""
    cutter = Cutter(url, after)
    proxies = [await asyncio.start_server(cutter, "127.0.0.1", 0) for _ in range(3)]
    engines = [f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}" for proxy in proxies]
    app = App(RouterConfig.model_validate({"engines": engines, "failure": {"resume": True}}))
    await app.start()
    server = HttpServer(app.handle)
    port = await server.listen("127.0.0.1", 0)
    try:
        return await streamed(f"http://127.0.0.1:{port}", path, fields), after
    finally:
        await server.drain(0)
        await app.close()
        for proxy in proxies:
            proxy.close()


def chat(thinking: bool) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "Say what comes to mind."}]
    return "/v1/chat/completions", {"messages": messages, "chat_template_kwargs": {"thinking": thinking}}


REQUESTS = {
    "thinking": chat(True),
    "answering": chat(False),
    "completion": ("/v1/completions", {"prompt": "Once upon a time"}),
    "ids": ("/v1/completions", {"prompt": "Once upon a time", "return_token_ids": True, "min_tokens": 20}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_that_is_cut_off_is_as_if_it_was_not(server: ServerProcess, tokenizer: Tokenizer, name: str) -> None:
    path, fields = REQUESTS[name]
    # Random weights end a thought where there is none: of such an answer the end alone could not be told apart.
    fields = fields | {"logit_bias": {str(tokenizer.token_to_id("</think>")): -100}}
    for after in ([2], [5], [20, 11], [MAX_TOKENS - 1]):
        alone = asyncio.run(streamed(server.url, path, fields))
        assert alone["usage"]["completion_tokens"] == MAX_TOKENS
        whole, left = asyncio.run(resumed(server.url, path, fields, list(after)))
        assert left == []
        # vLLM counts a thought's tokens by the pieces of text that they come in, and so differs from itself under load.
        thoughts = [
            one["usage"].pop("completion_tokens_details", {}).get("reasoning_tokens", 0) for one in (whole, alone)
        ]
        assert name != "thinking" or all(0 < count <= MAX_TOKENS for count in thoughts)
        assert whole == alone, after
