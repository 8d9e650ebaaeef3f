"""What users of routers have met, made to happen: to whole requests, to split ones, and with encoders before them."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import orjson
import pytest
from routed import LONG, Routed, read_reply, routed, run, until
from scripted_engine import Act, Engine, answer, broken, generates, in_turn, prefilled, streamed
from scripted_stream import stream, told

from deepinfer_router.api import Kind
from deepinfer_router.engine_state import EngineState

IDS = [0, 1, 0, 1, 1, 0]
TEXT = "a word" + "a word word" + "a"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
ENCODED = {"abc": {"item_indices": [0], "metadata": {}}}


class Layout:
    """A way to split requests, and how many hops one takes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hops = {"whole": 1, "split": 2, "encoded": 3}[name]

    def __call__(self, acts: Sequence[Act], **config: Any) -> AbstractAsyncContextManager[Routed]:
        """Engines that answer as `acts`; the others of the layout do well."""
        if self.name == "whole":
            return routed(acts, **config)
        encode = [answer({"ec_transfer_params": ENCODED})] if self.name == "encoded" else []
        stored = {"kvstore": {"stored_tokens": 640}}
        return routed(prefill=[prefilled(stored)], decode=acts, encode=encode, **config)

    def fields(self, **more: Any) -> dict[str, Any]:
        content: Any = LONG
        if self.name == "encoded":
            content = [{"type": "text", "text": LONG}, IMAGE]
        return {"messages": [{"role": "user", "content": content}], **more}

    def answering(self, router: Routed) -> list[Engine]:
        return router.engines[:2] if self.name == "whole" else router.engines[1:3]


@pytest.fixture(params=["whole", "split", "encoded"])
def layout(request: pytest.FixtureRequest) -> Layout:
    return Layout(request.param)


@pytest.fixture(params=[True, False], ids=["stream", "body"])
def streams(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def text_of(body: bytes, streams: bool) -> str:
    if not streams:
        return str(orjson.loads(body)["choices"][0]["message"]["content"])
    return told([body])[0]


@pytest.mark.parametrize("how", ["reset", "close", 500, 503, 429])
def test_what_one_engine_fails_another_serves(layout: Layout, streams: bool, how: str | int) -> None:
    """NVIDIA-NeMo/RL#3613: at most one more hop, and not to the engine that failed. sglang#39464: 503 is no death."""
    act = broken(how) if isinstance(how, str) else answer({"error": {"message": "no"}}, how)

    async def main() -> None:
        shared = in_turn(act, generates(IDS))
        async with layout([shared, shared]) as router:
            reply = await router.ask(**layout.fields(stream=streams), headers={"x-request-id": "mine"})
            assert (reply.status, reply.whole) == (200, True)
            assert text_of(reply.body, streams) == TEXT
            first, second = layout.answering(router)
            assert [len(first.asked), len(second.asked)] == [1, 1]
            ids = {asked.headers["x-request-id"] for engine in router.engines for asked in engine.asked}
            assert ids == ({"mine", "mine-image-0"} if layout.name == "encoded" else {"mine"})
            states = {engine.state for engine in router.app.fleet.engines.values()}
            assert states == ({EngineState.READY} if how in (503, 429) else {EngineState.READY, EngineState.SUSPECT})
            await router.settled()

    run(main)


@pytest.mark.parametrize("how", [503, 429, 500])
def test_a_fleet_that_is_full_is_not_asked_much_more(layout: Layout, streams: bool, how: int) -> None:
    """NVIDIA-NeMo/RL#3613: retries of a whole fleet's overload stay in a budget, and the client hears when to retry."""

    async def main() -> None:
        full = answer({"error": {"message": "full"}}, how)
        async with layout([full, full], fleet={"faults_to_open": 10_000}) as router:
            for _ in range(100):
                reply = await router.ask(**layout.fields(stream=streams))
                assert reply.status == how
                assert reply.error["message"] == "full"
                assert ("retry-after" in reply.headers) == (how != 500)
            hits = sum(len(engine.asked) for engine in layout.answering(router))
            assert hits <= 100 * 1.1 + 3
            await router.settled()

    run(main)


def test_what_the_client_did_wrong_is_no_fault_of_an_engine(layout: Layout, streams: bool) -> None:
    """sglang#25811: prompts that are too long opened the circuits of all engines."""

    async def main() -> None:
        refuses = answer({"error": {"message": "too long"}}, 400)
        async with layout([refuses, refuses]) as router:
            for number in range(1, 8):
                reply = await router.ask(**layout.fields(stream=streams))
                assert (reply.status, reply.error["message"]) == (400, "too long")
                assert sum(len(engine.asked) for engine in layout.answering(router)) == number
            assert {engine.state for engine in router.app.fleet.engines.values()} == {EngineState.READY}
            await router.settled()

    run(main)


@pytest.mark.parametrize("how", ["reset", "close", "stall"])
def test_a_stream_is_never_cut_short_silently(layout: Layout, how: str) -> None:
    """vllm#41530 and what three routers do: an error event, no end mark, and no second generation (miles#1334)."""

    async def main() -> None:
        breaks = generates(IDS, until=4, then=how)
        async with layout([breaks, breaks], failure={"stall_s": 0.5}) as router:
            reply = await router.ask(**layout.fields(stream=True))
            assert reply.status == 200
            assert not reply.whole
            assert b"[DONE]" not in reply.body
            assert told(reply.events[:-1])[0] == "a worda"
            assert reply.error["code"] == ("upstream_timeout" if how == "stall" else "upstream_lost")
            assert ("fell silent" if how == "stall" else "was lost") in reply.error["message"]
            assert ("x-resume" in reply.error["message"]) == (layout.name != "encoded")  # images cannot be resumed
            assert sum(len(engine.asked) for engine in layout.answering(router)) == 1
            await router.settled()

    run(main)


@pytest.mark.parametrize("how", ["reset", "close", "stall"])
def test_a_stream_goes_on_on_another_engine(layout: Layout, how: str) -> None:
    """Without a gap or a repeat, with the id and the usage of one answer, and nothing that was not asked for."""
    events = stream(Kind.CHAT, [7, 7, 7], IDS, with_ids=False, name="chat-mine")

    async def main() -> None:
        shared = in_turn(generates(IDS, until=4, then=how), generates(IDS))
        async with layout([shared, shared], failure={"stall_s": 0.5, "resume": True}) as router:
            reply = await router.ask(
                **layout.fields(stream=True, stream_options={"include_usage": True}, max_tokens=50),
                headers={"x-request-id": "mine"},
            )
            if layout.name == "encoded":  # an engine takes no token ids for a prompt with images
                assert reply.error["code"] in ("upstream_timeout", "upstream_lost")
                return
            assert [orjson.loads(e[6:]) for e in reply.events[:-1]] == [orjson.loads(e[6:]) for e in events[:-1]]
            assert reply.events[-1] == events[-1]
            assert reply.whole
            asked = [asked.body for engine in layout.answering(router) for asked in engine.asked]
            assert sorted(body["max_tokens"] for body in asked) == [47, 50]
            await router.settled()

    run(main)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_client_that_leaves_takes_the_engine_with_it(layout: Layout, streams: bool, when: str) -> None:
    """LiteLLM#37140: an engine went on generating for nobody. vllm-project/router#215: its counts stayed."""

    async def main() -> None:
        act = broken("stall") if when == "before" or not streams else generates(IDS, until=2, then="stall")
        async with layout([act, act]) as router:
            reader, writer = await router.send(**layout.fields(stream=streams))
            engines = layout.answering(router)
            await until(lambda: any(engine.asked for engine in engines))
            if when == "during" and streams:
                await reader.readuntil(b"\n\n")
            writer.transport.abort()
            asked = [asked for engine in engines for asked in engine.asked]
            await until(lambda: asked[0].left)
            assert len(asked) == 1
            await router.settled()

    run(main)


def test_an_engine_that_never_answers_holds_up_nobody(layout: Layout) -> None:
    """production-stack#749: there was no time limit to a first token."""

    async def main() -> None:
        shared = in_turn(broken("stall"), generates(IDS))
        async with layout([shared, shared], failure={"first_token_s": 0.5}) as router:
            reply = await router.ask(**layout.fields(stream=True))
            assert text_of(reply.body, True) == TEXT
            await router.settled()

    run(main)


def test_a_stream_without_a_first_token_is_served_by_another(layout: Layout) -> None:
    """The head of a stream comes before its prefill: until there is a token nothing has been told to the client."""

    async def main() -> None:
        shared = in_turn(generates(IDS, until=0, then="close"), generates(IDS))
        async with layout([shared, shared]) as router:
            reply = await router.ask(**layout.fields(stream=True))
            assert text_of(reply.body, True) == TEXT
            assert reply.whole
            await router.settled()

    run(main)


def test_engines_that_are_dead_are_found_out_one_by_one(layout: Layout, streams: bool) -> None:
    """When one engine that prefills and one that decodes die together a request meets both."""

    async def main() -> None:
        act = generates(IDS)
        async with layout([act, act, act], fleet={"probe_s": 1000, "poll_s": 1000}) as router:
            alive = layout.answering(router)[0]
            for engine in router.engines:
                if engine is not alive and engine is not router.engines[0]:
                    await engine.__aexit__()
            for _ in range(3):
                reply = await router.ask(**layout.fields(stream=streams))
                assert text_of(reply.body, streams) == TEXT
            await router.settled()

    run(main)


def test_a_deadline_ends_the_wait_for_an_answer(layout: Layout, streams: bool) -> None:
    async def main() -> None:
        async with layout([broken("stall"), broken("stall")]) as router:
            reply = await router.ask(**layout.fields(stream=streams), headers={"x-request-timeout-ms": "700"})
            assert (reply.status, reply.error["code"]) == (504, "upstream_timeout")
            await router.settled()

    run(main)


def test_a_prefill_without_a_stream_counts_for_as_long_as_it_is_predicted() -> None:
    """Such an answer comes after its decode: until then its engine would seem to prefill."""

    async def main() -> None:
        async with routed([broken("stall")]) as router:
            _, writer = await router.send()
            (target,) = router.targets
            await until(lambda: target.active == 1)
            await until(lambda: target.pending_seconds == 0)
            assert target.active == 1
            writer.transport.abort()
            await router.settled()

    run(main)


def test_an_unknown_model_is_told_at_once() -> None:
    async def main() -> None:
        async with routed([answer()]) as router:
            for engine in router.app.fleet.engines.values():
                engine.models = ("other",)
            router.app.fleet.changed()
            reply = await router.ask()
            assert (reply.status, reply.error["code"]) == (404, "model_not_found")

    run(main)


def test_a_draining_engine_ends_what_it_has(streams: bool) -> None:
    """production-stack#420: requests went to engines that were ending."""

    async def main() -> None:
        act = generates(IDS, first_s=0.2)
        async with routed([act, act]) as router:
            first = asyncio.create_task(router.ask(stream=streams))
            await until(lambda: any(engine.asked for engine in router.engines))
            busy = next(target.engine for target in router.targets if target.active)
            router.app.fleet.drain(busy.id)
            replies = await asyncio.gather(*(router.ask(stream=streams) for _ in range(4)), first)
            assert {text_of(reply.body, streams) for reply in replies} == {TEXT}
            assert sorted(len(engine.asked) for engine in router.engines) == [1, 4]
            await router.settled()

    run(main)


@pytest.mark.parametrize("begun", [True, False])
def test_a_router_that_stops_tells_those_that_wait(layout: Layout, begun: bool) -> None:
    """After the time for draining: an error event in a stream, a 503 before it."""

    async def main() -> None:
        act = generates(IDS, until=3, then="stall") if begun else broken("stall")
        async with layout([act, act]) as router:
            reader, writer = await router.send(**layout.fields(stream=True))
            engines = layout.answering(router)
            await until(lambda: any(engine.asked for engine in engines))
            if begun:
                await until(lambda: any(target.held_tokens for target in router.targets))
            draining = asyncio.create_task(router.server.drain(0.1))
            reply = await read_reply(reader)
            assert reply.error["code"] == "shutting_down"
            assert (reply.status, reply.whole) == ((200, False) if begun else (503, True))
            assert b"[DONE]" not in reply.body
            assert await draining == 1
            writer.close()
            await until(lambda: [asked for engine in engines for asked in engine.asked][0].left)
            await router.settled()

    run(main)


def test_the_rank_that_was_picked_is_asked() -> None:
    async def main() -> None:
        async with routed([answer()], ranks=4) as router:
            for _ in range(12):
                await router.ask()
            ranks = {asked.headers["x-data-parallel-rank"] for asked in router.engines[0].asked}
            assert ranks <= {"0", "1", "2", "3"}
            assert len(ranks) > 1
            await router.settled()

    run(main)


def test_a_stream_of_another_api_ends_with_its_own_error() -> None:
    async def main() -> None:
        events = [b'event: message_start\ndata: {"type": "message_start"}\n\n']
        async with routed([streamed(events, then="close")]) as router:
            reply = await router.ask("/v1/messages", stream=True, max_tokens=5, messages=[])
            kind, _, data = reply.events[-1].partition(b"\n")
            assert kind == b"event: error"
            assert orjson.loads(data[6:])["type"] == "error"

    run(main)
