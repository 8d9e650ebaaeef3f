"""What the router writes into bodies, read by the code of vLLM that reads it there."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from exchanges import received
from recipe_case import recipe_entry, write_tokenizer

from deepinfer_router.api import POSTED, Kind
from deepinfer_router.entry import Entry
from deepinfer_router.handover import TwoStep
from deepinfer_router.identity_config import Grant, IdentityConfig
from deepinfer_router.request import Request
from deepinfer_router.resume import resumed_changes
from deepinfer_router.store_config import StoreConfig
from deepinfer_router.transcript import Transcript

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
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    fields = orjson.loads(body)
    if route == "/v1/completions":
        return CompletionRequest.model_validate(fields)
    if route == "/inference/v1/generate":
        return GenerateRequest.model_validate(fields)
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


ANSWERED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **{"messages": [USER], "max_completion_tokens": 90, "min_tokens": 5, "n": 2, "logprobs": True},
        **{"top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}, "stop": ["x"]},
    },
    "/v1/messages": {
        **{"messages": [USER], "max_tokens": 2000, "stream": True, "stop_sequences": ["x"]},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    "/v1/responses": {"input": "Hi", "max_output_tokens": 90, "stream": True, "top_logprobs": 2},
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 90, "min_tokens": 5, "n": 2, "logprobs": 1, "stream": True},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 90, "min_tokens": 5}},
}
"""Requests with much that shapes an answer."""


def sampling(read: Any) -> Any:
    """What the engine core is given."""
    return read.sampling_params if hasattr(read, "sampling_params") else read.to_sampling_params(1 << 20, {})


def bound(read: Any) -> int | None:
    """The client's bound of an answer, as vLLM's serving classes look for it."""
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    return next((value for name in names if (value := getattr(read, name, None)) is not None), None)


def read_by(entry: Entry, route: str, fields: dict[str, Any]) -> Request:
    request = entry.read(received(route, {"model": "m", **fields}))
    request.release()
    return request


@pytest.mark.parametrize("route", ANSWERED)
def test_a_prefill_hop_is_one_token_of_the_same_prompt(route: str) -> None:
    """And its `kv_transfer_params` reach the connector."""
    request = read_by(Entry(), route, ANSWERED[route])
    whole = as_vllm_reads(route, request.body())
    hop = TwoStep(reusable=True).prefill(request.api, request.fields, {"kvstore": {"tenant": "t"}}, "")
    read = as_vllm_reads(route, request.body(hop))
    params = sampling(read)
    assert (bound(read) or params.max_tokens, params.min_tokens, params.n, params.logprobs) == (1, 0, 1, None)
    assert not read.stream and not getattr(read, "stream_options", None)
    told = read.kv_transfer_params if hasattr(read, "kv_transfer_params") else params.extra_args["kv_transfer_params"]
    assert (told["do_remote_decode"], told["do_remote_prefill"], told["kvstore"]) == (True, False, {"tenant": "t"})
    prompt = {"messages", "input", "prompt", "token_ids"} & set(type(read).model_fields)
    assert prompt and all(getattr(read, name) == getattr(whole, name) for name in prompt)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"])
def test_a_resumed_hop_goes_on_after_the_tokens_that_were_told(route: str) -> None:
    from vllm.renderers.online_renderer import _reused_prompt_token_ids

    fields = {**ANSWERED[route], "n": 1, "logprobs": None, "top_logprobs": None, "stop": None}
    request = read_by(Entry(), route, fields)
    kind = POSTED[route.encode()].kind
    transcript = Transcript(kind, shows_ids=False, prompt_ids=[1, 2])
    transcript.ids, transcript.told = [7, 8, 9], 2
    transcript.rewind()
    read = as_vllm_reads(route, request.body(resumed_changes(kind, fields, transcript, 90)))
    params = sampling(read)
    assert (bound(read) or params.max_tokens, params.min_tokens) == (88, 3)
    if kind is Kind.CHAT:
        assert _reused_prompt_token_ids(read, AnyIds(), read.messages) == [1, 2, 7, 8]
    else:
        assert (read.prompt if kind is Kind.COMPLETION else read.token_ids) == [1, 2, 7, 8]
    assert read.return_token_ids or kind is Kind.GENERATE
