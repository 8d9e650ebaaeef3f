"""The mock engine answers as vLLM does: forms, counts, tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import aiohttp
import pytest

from deepinfer_simulator import engine_tokens as tokens
from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_requests import chat_prompt
from mock_engines import mock_engines, until

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def post(url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=headers) as answer:
        text = await answer.text()
        if "text/event-stream" not in answer.headers["content-type"]:
            return answer.status, json.loads(text)
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        return answer.status, [json.loads(line) if line != "[DONE]" else line for line in lines]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_says_what_follows_from_its_prompt(stream: bool) -> None:
    async def work() -> None:
        async with mock_engines() as (engine,):
            more = {
                "stream": stream,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
                "max_tokens": 9,
            }
            status, found = await post(f"{engine.url}/v1/chat/completions", {**CHAT, **more})
            prompt = chat_prompt(CHAT["messages"])
            expected = tokens.continuation(prompt, 9)
            assert status == 200
            if stream:
                assert found[-1] == "[DONE]" and found[-2]["choices"] == []
                ids = [token for event in found[1:-2] for token in event["choices"][0]["token_ids"]]
                text = "".join(event["choices"][0]["delta"]["content"] for event in found[:-2])
                finish, usage, echoed = found[-3]["choices"][0]["finish_reason"], found[-2]["usage"], found[0]
            else:
                (choice,) = found["choices"]
                ids, text, finish = choice["token_ids"], choice["message"]["content"], choice["finish_reason"]
                usage, echoed = found["usage"], found
            assert (ids, text, finish) == (expected, tokens.decode(expected), "length")
            assert echoed["prompt_token_ids"] == prompt
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 9)
            assert engine.running == 0 and engine.counts["length"] == 1

    run(work())


def test_an_answer_goes_on_elsewhere_without_a_gap() -> None:
    async def work() -> None:
        async with mock_engines(2, EngineConfig(end_every=20)) as (first, second):
            body = {"token_ids": tokens.encode("once upon a time"), "sampling_params": {"max_tokens": 40}}
            _, whole = await post(f"{first.url}/inference/v1/generate", body)
            ids = whole["choices"][0]["token_ids"]
            rest = {"token_ids": body["token_ids"] + ids[:5], "sampling_params": {"max_tokens": 35}}
            _, more = await post(f"{second.url}/inference/v1/generate", rest)
            assert ids[:5] + more["choices"][0]["token_ids"] == ids
            assert more["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]

    run(work())


def test_a_prefix_seen_before_is_cached_by_salt() -> None:
    async def work() -> None:
        async with mock_engines() as (engine,):
            url, body = f"{engine.url}/v1/completions", {"prompt": "x" * 100, "max_tokens": 1}
            cached = []
            for salt in ("", "", "other"):
                _, found = await post(url, {**body, "cache_salt": salt})
                cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert cached == [0, 96, 0]

    run(work())


def test_the_other_apis_have_their_forms() -> None:
    async def work() -> None:
        async with mock_engines() as (engine,):
            _, found = await post(f"{engine.url}/v1/messages", {**CHAT, "max_tokens": 4})
            assert found["type"] == "message" and found["stop_reason"] == "max_tokens"
            _, events = await post(f"{engine.url}/v1/messages", {**CHAT, "max_tokens": 2, "stream": True})
            assert [event["type"] for event in events] == [
                "message_start",
                "content_block_start",
                "content_block_delta",
                "content_block_delta",
                "content_block_stop",
                "message_delta",
                "message_stop",
            ]
            _, found = await post(f"{engine.url}/v1/responses", {"input": "hi", "max_output_tokens": 3})
            assert found["status"] == "incomplete" and len(found["output"][0]["content"][0]["text"]) == 3
            _, found = await post(f"{engine.url}/v1/embeddings", {"input": ["a", "b"]})
            assert [len(one["embedding"]) for one in found["data"]] == [8, 8]
            _, found = await post(f"{engine.url}/rerank", {"query": "ab", "documents": ["zz", "ab"]})
            assert [one["index"] for one in found["results"]] == [1, 0]
            _, found = await post(f"{engine.url}/score", {"text_1": "ab", "text_2": ["zz", "ab"]})
            assert [one["score"] for one in found["data"]] == [0.0, 1.0]
            _, found = await post(f"{engine.url}/tokenize", {"prompt": "hi"})
            assert found["tokens"] == [104, 105]
            assert await post(f"{engine.url}/detokenize", {"tokens": [104, 105]}) == (200, {"prompt": "hi"})

    run(work())


def test_what_vllm_refuses_is_refused() -> None:
    async def work() -> None:
        async with mock_engines(1, EngineConfig(max_model_tokens=64)) as (engine,):
            url = f"{engine.url}/v1/chat/completions"
            for body, status in (
                ({**CHAT, "model": "other"}, 404),
                ({"model": "mock"}, 400),
                ({**CHAT, "max_tokens": 100}, 400),
                ({**CHAT, "max_tokens": 0}, 400),
                ([], 400),
            ):
                found, error = await post(url, body)
                assert (found, error["error"]["code"]) == (status, status)
            assert engine.counts["refused"] == 5
            assert (await post(url, CHAT, {"X-data-parallel-rank": "1"}))[0] == 400

    run(work())


def test_tools_and_structured_output_are_prescribed() -> None:
    async def work() -> None:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
        async with mock_engines() as (engine,):
            url = f"{engine.url}/v1/chat/completions"
            body = {**CHAT, "tools": [tool], "tool_choice": "required", "max_tokens": 100}
            _, found = await post(url, body)
            (call,) = found["choices"][0]["message"]["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": '{"city":"a"}'}
            assert found["choices"][0]["finish_reason"] == "tool_calls"
            shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            _, found = await post(url, {**CHAT, "response_format": shape, "max_tokens": 100})
            assert found["choices"][0]["message"]["content"] == '{"city":"a"}'

    run(work())


def test_capacity_makes_requests_wait_and_growth_preempts() -> None:
    async def work() -> None:
        config = EngineConfig(capacity_tokens=100, block_tokens=10, max_sequences=2)
        async with mock_engines(1, config) as (engine,):
            url, body = f"{engine.url}/v1/completions", {"max_tokens": 40}
            answers = await asyncio.gather(*(post(url, {**body, "prompt": letter * 40}) for letter in "abc"))
            for letter, (status, found) in zip("abc", answers, strict=True):
                assert status == 200
                assert found["choices"][0]["text"] == tokens.decode(tokens.continuation(tokens.encode(letter * 40), 40))
            (rank,) = engine.ranks
            assert rank.most_running == 2 and rank.preemptions >= 1
            assert (rank.held_tokens, rank.running, rank.waiting) == (0, [], [])

    run(work())


def test_a_stream_s_head_comes_before_its_turn() -> None:
    """As vLLM's, which waits for no token; so a router must not take it for one."""

    async def work() -> None:
        async with mock_engines(1, EngineConfig(max_sequences=1, time_scale=1.0)) as (engine,):
            body = {"prompt": "a b c", "max_tokens": 100_000, "stream": True}
            url = f"{engine.url}/v1/completions"
            async with aiohttp.ClientSession() as client, client.post(url, json=body) as first:
                assert first.status == 200 and (await first.content.readline()).startswith(b"data: ")
                async with client.post(url, json=body) as second:
                    assert second.status == 200
                    assert engine.running == 2 and second.content.total_bytes == 0

    run(work())


def test_a_full_queue_is_a_503() -> None:
    async def work() -> None:
        config = EngineConfig(max_sequences=1, max_waiting=1, time_scale=1.0)
        async with mock_engines(1, config) as (engine,):
            url, body = f"{engine.url}/v1/completions", {"prompt": "x", "max_tokens": 10_000}
            held = [asyncio.ensure_future(post(url, body)) for _ in range(2)]
            await until(lambda: engine.running == 2)
            assert (await post(url, body))[0] == 503
            for task in held:
                task.cancel()
            await until(lambda: engine.counts["abort"] == 2 and engine.running == 0)

    run(work())


def test_metrics_have_vllms_names() -> None:
    async def work() -> None:
        async with mock_engines(1, EngineConfig(ranks=2)) as (engine,):
            await post(
                f"{engine.url}/v1/completions", {"prompt": "abc", "max_tokens": 5}, {"X-data-parallel-rank": "1"}
            )
            async with aiohttp.ClientSession() as client, client.get(f"{engine.url}/metrics") as answer:
                text = await answer.text()
            assert 'vllm:num_requests_running{engine="1",model_name="mock"} 0' in text
            assert 'vllm:generation_tokens_total{engine="1",model_name="mock"} 5' in text
            assert 'vllm:generation_tokens_total{engine="0",model_name="mock"} 0' in text
            assert 'block_size="16",num_gpu_blocks="262144"' in text

    run(work())
