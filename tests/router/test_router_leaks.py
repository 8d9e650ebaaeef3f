"""Whatever clients and engines do, nothing stays counted, open or running: the whole router, at random."""

import asyncio
import gc
import os
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routed import LONG, Routed, read_reply, routed, until
from scripted_engine import Act, Asked, answer, broken, generates, prefilled

from deepinfer_router.http_client import Upstream
from deepinfer_router.request import Request

IDS = [0, 1, 0, 1, 1, 0]
DECODES = [
    generates(IDS),
    generates(IDS, pause_s=0.002),
    generates(IDS, until=2, then="reset"),
    generates(IDS, until=3, then="close"),
    generates(IDS, until=1, then="stall"),
    broken("stall"),
    broken("reset"),
    answer({"error": {}}, 503),
    answer({"error": {}}, 500),
    answer({"error": {}}, 400),
    answer(b"{"),
]
PREFILLS = [
    prefilled(),
    prefilled({"do_remote_prefill": True, "remote_block_ids": [1]}, cached_tokens=3),
    broken("stall"),
    broken("reset"),
    answer({"error": {}}, 429),
    answer(b"nonsense"),
]
ENCODES = [answer({"ec_transfer_params": {"a": {}}}), broken("reset"), broken("stall"), answer({}, 500)]
IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}}


def at_random(acts: list[Act], rng: random.Random) -> Act:
    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        return await rng.choice(acts)(asked, writer)

    return act


async def client(router: Routed, rng: random.Random) -> None:
    """One request; it may leave at any time."""
    await asyncio.sleep(rng.random() * 0.2)
    content: Any = rng.choice(["hi", LONG, [{"type": "text", "text": LONG}, IMAGE]])
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "stream": rng.random() < 0.6}
    if rng.random() < 0.5:
        fields["stream_options"] = {"include_usage": True}
    headers = {"x-resume": rng.choice(["true", "false"])}
    if rng.random() < 0.2:
        headers["x-request-timeout-ms"] = str(rng.randrange(1, 300))
    reader, writer = await router.send(headers=headers, **fields)
    try:
        async with asyncio.timeout(rng.choice([0.0, 0.01, 0.05, 0.2, 2.0])):
            await read_reply(reader)
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()


@settings(max_examples=6)
@given(st.integers(0, 1 << 30), st.sampled_from(["whole", "split", "encoded"]))
def test_nothing_is_left_of_requests_however_they_end(seed: int, layout: str) -> None:
    """vllm-project/router#215, production-stack#1072, sglang-omni#931: counts that never came down, or went below 0."""

    async def main() -> None:
        rng = random.Random(seed)
        decodes = [at_random(DECODES, rng) for _ in range(2)]
        prefills = [at_random(PREFILLS, rng) for _ in range(2)]
        encodes = [at_random(ENCODES, rng)] if layout == "encoded" else []
        failure = {"stall_s": 0.4, "first_token_s": 0.4}
        fleet = {"faults_to_open": 4, "backoff_first_s": 0.05, "backoff_most_s": 0.1, "probe_soon_s": 0.05}
        admission = {"max_waiting": 20, "max_wait_s": 0.5}
        config: dict[str, Any] = {"failure": failure, "fleet": fleet, "admission": admission}
        config["disaggregation"] = {"connector": "nixl"}
        engines: dict[str, Any] = {"encode": encodes}
        if layout == "whole":
            engines["acts"] = decodes
        else:
            engines |= {"prefill": prefills, "decode": decodes}
        async with routed(**engines, **config) as router:
            await asyncio.gather(*(client(router, rng) for _ in range(60)))
            await router.settled()
            await router.app.disaggregated.close()
            everybody = router.app.entry.identities.everybody
            assert everybody is not None
            await until(lambda: not router.server.tasks and not router.server.connections)
            assert everybody.active == router.app.admission.waiting == 0
            await until(lambda: all(asked.over for engine in router.engines for asked in engine.asked))

    asyncio.run(asyncio.wait_for(main(), 120))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("split", [False, True])
def test_no_descriptor_is_left_of_clients_that_leave(split: bool) -> None:
    """Both ends are in this process: what engines and clients kept open would be counted, too."""

    async def main() -> None:
        rng = random.Random(1)
        acts = [generates(IDS, pause_s=0.002), generates(IDS, until=2, then="stall"), broken("stall")]
        engines: dict[str, Any] = {"acts": [at_random(acts, rng)] * 2}
        if split:
            engines = {"prefill": [at_random(PREFILLS[:3], rng)], "decode": [at_random(acts, rng)]}
        timeouts = {"idle_s": 0.1}  # what is not used goes then, and polls have nothing to go on with
        fleet = {"probe_s": 3600.0, "poll_s": 3600.0}
        failure = {"stall_s": 0.4, "first_token_s": 0.4}
        async with routed(**engines, http={"timeouts": timeouts}, fleet=fleet, failure=failure) as router:
            await until(lambda: all(not up.connections for up in upstreams(router)))
            await asyncio.sleep(0.1)  # the engines' ends
            before = descriptors()
            for _ in range(2):
                await asyncio.gather(*(client(router, rng) for _ in range(60)))
            await router.settled()
            await until(lambda: descriptors() <= before)
            assert all(not up.connections for up in upstreams(router))

    asyncio.run(asyncio.wait_for(main(), 120))


def upstreams(router: Routed) -> list[Upstream]:
    return [router.app.upstreams.of(engine) for engine in router.app.fleet.engines.values()]


def requests_kept() -> int:
    return sum(type(each) is Request for each in gc.get_objects())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("act", range(len(DECODES)))
@pytest.mark.parametrize("leaves", [False, True])
def test_no_request_waits_for_the_collector(act: int, leaves: bool, stream: bool, split: bool) -> None:
    """It comes rarely, and a body may have 64 MB: an error that refers to its own frame keeps one."""

    async def main() -> None:
        engines: dict[str, Any] = {"acts": [DECODES[act]]}
        if split:
            engines = {"prefill": [prefilled()], "decode": [DECODES[act]]}
        failure = {"stall_s": 0.3, "first_token_s": 0.3, "request_timeout_s": 0.5}
        async with routed(**engines, failure=failure) as router:
            for _ in range(2):
                reader, writer = await router.send(prompt=LONG, stream=stream)
                if leaves:
                    await until(lambda: bool(router.engines[-1].asked))
                else:
                    await asyncio.wait_for(read_reply(reader), 30)
                writer.close()
                await router.settled()
                await until(lambda: not router.server.tasks and not router.server.connections)
            await until(lambda: requests_kept() == 0)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
