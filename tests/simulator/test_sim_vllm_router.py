"""Our versions of vllm-router's rules beside vllm-router 0.1.17 itself, request by request.

Needs the program: VLLM_ROUTER=/path, or where `make bench-router` puts it, or on PATH.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deepinfer_router.target import Engine, Target
from deepinfer_simulator.baselines import PowerOf, RoundRobin, requests
from deepinfer_simulator.baselines_prefix import CacheAware, TraceWork
from deepinfer_simulator.policy import Policy
from deepinfer_vllm.server_process import free_port

aiohttp = pytest.importorskip("aiohttp")
BUILT = Path(__file__).resolve().parents[2] / "build" / "vllm-router" / "bin" / "vllm-router"
PROGRAM = os.environ.get("VLLM_ROUTER") or (str(BUILT) if BUILT.is_file() else shutil.which("vllm-router"))
pytestmark = pytest.mark.skipif(not PROGRAM, reason="no vllm-router: set VLLM_ROUTER, or run `make bench-router` once")

Ask = Callable[[str], Awaitable[int]]
"""Send a prompt whose answer does not come before the end; which engine got it."""


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[tuple[list[str], asyncio.Queue[int], asyncio.Event]]:
    """URLs of engines that answer completions once the event is set; the queue tells which got each."""
    from aiohttp import web

    got: asyncio.Queue[int] = asyncio.Queue()
    over = asyncio.Event()
    runners, urls = [], []

    def handler(number: int) -> Callable[[Any], Awaitable[Any]]:
        async def handle(request: Any) -> Any:
            body = await request.json() if request.can_read_body else {}
            if request.path == "/v1/completions/render":  # tokens, without which cache_aware sees no prefix
                return web.json_response([{"request_id": "r", "token_ids": [ord(letter) for letter in body["prompt"]]}])
            if request.path == "/v1/completions":
                got.put_nowait(number)
                await over.wait()
            return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}], "choices": []})

        return handle

    try:
        for number in range(count):
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handler(number))
            runners.append(web.AppRunner(app))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runners[-1].addresses[0][1]}")
        yield urls, got, over
    finally:
        over.set()
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def vllm_router(count: int, *options: str) -> AsyncIterator[Ask]:
    async with engines(count) as (urls, got, over), aiohttp.ClientSession() as client:
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            str(PROGRAM), "--port", str(port), "--prometheus-port", str(free_port()), *options, "--worker-urls", *urls,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        asked: list[asyncio.Task[Any]] = []

        async def post(prompt: str) -> None:
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with client.post(url, json={"model": "m", "prompt": prompt}) as answer:
                await answer.read()

        async def ask(prompt: str) -> int:
            asked.append(asyncio.create_task(post(prompt)))
            return await asyncio.wait_for(got.get(), 60)

        async def ready() -> bool:
            try:
                async with client.get(f"http://127.0.0.1:{port}/health") as answer:
                    return bool(answer.status == 200)
            except aiohttp.ClientError:
                return False

        try:
            async with asyncio.timeout(60):
                while not await ready():
                    assert process.returncode is None, "vllm-router did not start"
                    await asyncio.sleep(0.1)
            yield ask
            over.set()
            await asyncio.gather(*asked)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def compared(ask: Ask, policy: Policy, order: Sequence[int], prompts: Sequence[str], sent: list[int]) -> None:
    """Every prompt goes where `policy` would send it. `order`: the engines in the order the program has them in;
    `sent`: those that have got a request, which all are still there."""
    targets = [Target(Engine(str(number), "http://e"), active=sent.count(number)) for number in order]
    for prompt in prompts:
        pick = policy.pick(TraceWork(prompt_tokens=len(prompt), elements=prompt), targets, 0.0, Random(0))
        assert pick is not None
        pick.target.active += 1
        assert (prompt[:12], await ask(prompt)) == (prompt[:12], int(pick.target.engine.id)), pick.reason


def test_round_robin() -> None:
    async def case() -> None:
        async with vllm_router(3, "--policy", "round_robin") as ask:
            order = [await ask("x") for _ in range(3)]
            assert sorted(order) == [0, 1, 2]
            await compared(ask, RoundRobin(), order, ["x"] * 7, order)

    asyncio.run(case())


def test_power_of_two() -> None:
    """Of two engines it takes the one with fewer requests; which of equals is chance."""

    async def case() -> None:
        async with vllm_router(2, "--policy", "power_of_two") as ask:
            sent = list[int]()
            for _ in range(4):
                first = await ask("x")
                await compared(ask, PowerOf(2, requests), [0, 1], ["x"], [*sent, first])
                sent += [0, 1]

    asyncio.run(case())


def test_cache_aware() -> None:
    """Prefixes, the threshold of 0.3 from both sides, imbalance, and unknown prompts."""
    known = [f"{name}!" * 20 for name in ("anna", "bert", "carl")]
    prompts = [
        *(known[1] + "tail" for _ in range(3)),  # follow it to one engine
        *(known[1] + "tail" for _ in range(2)),  # four there and one elsewhere: imbalanced by more than 2
        known[2] + "x" * 30,
        known[0] + "x" * 30,
        known[2][:29] + "q" * 71,  # less than 0.3 of it
        known[2][:31] + "r" * 69,
        known[2][:35] + "s" * 65,
        *(letter * 40 for letter in "tuvw"),  # unknown
        known[0],
    ]

    async def case() -> None:
        async with vllm_router(3, "--policy", "cache_aware", "--balance-abs-threshold", "2") as ask:
            order = [await ask(prompt) for prompt in known]
            assert sorted(order) == [0, 1, 2]
            policy = CacheAware(absolute=2)
            empty = [Target(Engine(str(number), "http://e")) for number in order]
            for prompt in known:
                pick = policy.pick(TraceWork(prompt_tokens=len(prompt), elements=prompt), empty, 0.0, Random(0))
                assert pick is not None
                pick.target.active += 1
            assert [target.active for target in empty] == [1, 1, 1]
            await compared(ask, policy, order, prompts, order)

    asyncio.run(case())
