"""Prefill and decode on two mock engines: what a router sees of vLLM's NIXL and Mooncake connectors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import aiohttp

from deepinfer_simulator import engine_tokens as tokens
from deepinfer_simulator.engine_config import EngineConfig
from deepinfer_simulator.engine_server import MockEngine
from mock_engines import mock_engines, until

BODY = {"prompt": "a prompt of some length " * 4, "max_tokens": 6}
TEXT = tokens.decode(tokens.continuation(tokens.encode(BODY["prompt"]), 6))
PREFILL = {**BODY, "max_tokens": 1}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def post(engine: MockEngine, body: Any) -> Any:
    async with aiohttp.ClientSession() as client, client.post(f"{engine.url}/v1/completions", json=body) as answer:
        return await answer.json()


async def nixl_prefill(engine: MockEngine) -> dict[str, Any]:
    found = await post(
        engine, {**PREFILL, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    )
    params: dict[str, Any] = found["kv_transfer_params"]
    return params


def test_nixl_reads_once_and_frees() -> None:
    async def work() -> None:
        async with mock_engines(2, EngineConfig(connector="nixl")) as (prefill, decode):
            params = await nixl_prefill(prefill)
            assert params["do_remote_prefill"] and params["remote_engine_id"] == prefill.engine_id
            assert prefill.ranks[0].leased_tokens == len(BODY["prompt"])
            found = await post(decode, {**BODY, "kv_transfer_params": params})
            assert found["choices"][0]["text"] == TEXT
            assert decode.transfer.fetched_tokens == len(BODY["prompt"])
            assert (len(prefill.transfer.leases), prefill.ranks[0].leased_tokens) == (0, 0)
            again = await post(decode, {**BODY, "prompt": BODY["prompt"] + "!", "kv_transfer_params": params})
            assert len(again["choices"][0]["text"]) == 6 and decode.transfer.failed_fetches == 1

    run(work())


def test_nixl_blocks_expire_and_are_computed_again() -> None:
    async def work() -> None:
        async with mock_engines(2, EngineConfig(connector="nixl", lease_s=0.05)) as (prefill, decode):
            params = await nixl_prefill(prefill)
            await until(lambda: prefill.transfer.expired == 1)
            found = await post(decode, {**BODY, "kv_transfer_params": params})
            assert found["choices"][0]["text"] == TEXT and decode.transfer.failed_fetches == 1

    run(work())


def test_nixl_blocks_are_let_go_when_the_client_leaves_before_decode_began() -> None:
    """vllm-project/vllm#50425: a request that is cancelled at the decode engine frees the prefill engine's blocks."""

    async def work() -> None:
        config = EngineConfig(connector="nixl", max_sequences=1, time_scale=1.0)
        async with mock_engines(2, config) as (prefill, decode):
            params = await nixl_prefill(prefill)
            busy = asyncio.ensure_future(post(decode, {**BODY, "max_tokens": 100_000}))
            await until(lambda: decode.running == 1)
            waiting = asyncio.ensure_future(post(decode, {**BODY, "kv_transfer_params": params}))
            await until(lambda: decode.running == 2)
            waiting.cancel()
            await until(lambda: not prefill.transfer.leases)
            assert (prefill.transfer.expired, decode.transfer.fetched_tokens) == (0, 0)
            busy.cancel()
            await until(lambda: decode.running == 0)

    run(work())


def test_mooncake_is_asked_at_once_and_needs_an_end_by_length() -> None:
    async def work() -> None:
        async with mock_engines(2, EngineConfig(connector="mooncake", lease_s=5, end_every=1)) as (prefill, decode):
            to = {"transfer_id": "xfer-1", "remote_engine_id": prefill.engine_id, "remote_bootstrap_addr": prefill.url}
            wanted = {**BODY, "ignore_eos": True, "kv_transfer_params": {**to, "do_remote_prefill": True}}
            given = {
                **PREFILL,
                "ignore_eos": True,
                "kv_transfer_params": {"transfer_id": "xfer-1", "do_remote_decode": True},
            }
            decoded = asyncio.ensure_future(post(decode, wanted))
            await until(lambda: decode.counts["/v1/completions"] == 1)
            assert (await post(prefill, given))["kv_transfer_params"] is None
            await decoded
            assert decode.transfer.fetched_tokens == len(BODY["prompt"]) and not prefill.transfer.leases
            stops = {**given, "ignore_eos": False, "kv_transfer_params": {"transfer_id": "2", "do_remote_decode": True}}
            await post(prefill, stops)
            assert not prefill.transfer.leases

    run(work())
