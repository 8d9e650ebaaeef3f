"""What the router writes into bodies, read by the code of vLLM that reads it there."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from exchanges import received
from recipe_case import recipe_entry, write_tokenizer

from deepinfer_router.identity_config import Grant, IdentityConfig
from deepinfer_router.request import Request
from deepinfer_router.store_config import StoreConfig

pytestmark = pytest.mark.vllm

USER = {"role": "user", "content": "Hi"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/v1/responses": {"input": "Hi"},
}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Request]:
    """One a route, encoded with recipe, with a tenant and a salt."""
    directory = tmp_path_factory.mktemp("contract")
    tokenizer = write_tokenizer(directory)

    async def run() -> dict[str, Request]:
        identity = IdentityConfig(everybody=Grant(tenant="t", ttl_class="chat", cache_salt="s"))
        entry = recipe_entry(tokenizer, identity=identity, store=StoreConfig(socket=Path(directory / "none.sock")))
        read = {route: entry.read(received(route, {"model": "m", **fields})) for route, fields in ROUTES.items()}
        for request in read.values():
            await entry.prepare(request)
        await entry.close()
        return read

    return asyncio.run(run())


class AnyIds:
    """A renderer's vocabulary, wide enough."""

    def validate_token_ids(self, ids: list[int], parameter: str) -> None:
        assert max(ids) < 1024


def as_vllm_reads(route: str, body: bytes) -> Any:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    fields = orjson.loads(body)
    if route == "/v1/chat/completions":
        return ChatCompletionRequest.model_validate(fields)
    if route == "/v1/responses":
        return ResponsesRequest.model_validate(fields)
    return AnthropicServingMessages.to_chat_completion_request(AnthropicMessagesRequest.model_validate(fields))


@pytest.mark.parametrize("route", ROUTES)
def test_token_ids_salt_and_store_fields(requests: dict[str, Request], route: str) -> None:
    from vllm.renderers.online_renderer import _reused_prompt_token_ids

    request = requests[route]
    read = as_vllm_reads(route, request.body())
    messages = getattr(read, "messages", None)
    assert _reused_prompt_token_ids(read, AnyIds(), messages) == request.token_ids
    assert read.kv_transfer_params == {"kvstore": {"tenant": "t", "ttl_class": "chat"}}
    assert read.cache_salt == "s"
    assert read.chat_template_kwargs["thinking"] is True
