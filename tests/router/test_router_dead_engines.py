"""Engines that die: what they had, and what comes meanwhile, is served while one of their role is left."""

import asyncio
from collections.abc import Callable

import pytest
from routed import LONG, Routed, routed, run, until
from scripted_engine import Act, Asked, Engine, answer, broken, completion, generates, prefilled

from deepinfer_router.engine_state import EngineState
from deepinfer_router.lease import Lease
from deepinfer_router.roles import Role
from deepinfer_router.work import Work

IDS = [0, 1, 0, 1, 1, 0]
UNWATCHED = {"probe_s": 1000, "probe_soon_s": 1000, "poll_s": 1000}
"""Only requests find out."""


def dies(engine: Engine) -> Act:
    """When it is asked: as a killed one, of which the router does not know yet, looks over a connection of its pool."""

    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        engine.stop_listening()
        return await broken("reset")(asked, writer)

    return act


def busy(router: Routed, role: Role, *names: str) -> list[Lease]:
    """Those are not the first choice."""
    targets = [router.app.fleet.engines[name].targets[0] for name in names]
    return [router.app.fleet.book(target, Work(prompt_tokens=100), role, 0.5) for target in targets]


def give_back(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release("done")


@pytest.mark.parametrize("stream", [True, False])
def test_one_of_each_role_dies(stream: bool) -> None:
    """A request meets both over connections that were open: each of its two hops finds another engine."""

    async def main() -> None:
        ready = prefilled({"kvstore": {"stored_tokens": 640}})
        split = {"local_tokens": 0}
        acts = {"prefill": [ready] * 2, "decode": [generates(IDS)] * 2}
        async with routed(**acts, fleet=UNWATCHED, disaggregation=split) as router:
            leases = busy(router, Role.PREFILL, "prefill-1") + busy(router, Role.DECODE, "decode-3")
            fields = {"messages": [{"role": "user", "content": LONG}], "stream": stream}
            assert (await router.ask(**fields)).status == 200  # which leaves a connection to each of the first
            for engine in (router.engines[0], router.engines[2]):
                engine.act = dies(engine)
            reply = await router.ask(**fields)
            assert (reply.status, reply.whole) == (200, True)
            # The other engine prefilled it again for the decode that could not be foreseen.
            assert [len(engine.asked) for engine in router.engines] == [2, 2, 2, 1]
            give_back(leases)
            await router.settled()

    run(main)


def test_one_after_another_is_found_dead() -> None:
    """Where nothing was sent nothing is tried twice, however many are gone."""

    async def main() -> None:
        async with routed([generates(IDS)] * 8, fleet=UNWATCHED) as router:
            leases = busy(router, Role.DECODE, "prefill-decode-7")
            for engine in router.engines[:7]:
                await engine.__aexit__()
            replies = [await router.ask(stream=True) for _ in range(4)]
            assert {(reply.status, reply.whole) for reply in replies} == {(200, True)}
            give_back(leases)
            await router.settled()

    run(main)


async def bounded(router: Routed) -> list[Lease]:
    """The first is dead, and the second has all that it may have."""
    await router.engines[0].__aexit__()
    engine = router.app.fleet.engines["prefill-decode-1"]
    leases = busy(router, Role.DECODE, engine.id)
    router.app.fleet.pressured(engine)
    return leases


def test_an_engine_without_room_is_waited_for() -> None:
    async def main() -> None:
        async with routed([generates(IDS)] * 2, fleet=UNWATCHED) as router:
            leases = await bounded(router)
            asking = asyncio.create_task(router.ask())
            await until(lambda: router.app.admission.waiting == 1 or asking.done())
            give_back(leases)
            assert (await asking).status == 200
            await router.settled()

    run(main)


def test_an_engine_that_has_no_room_in_time_is_no_dead_one() -> None:
    """The client hears that it may come again, and not of an engine that it never had."""

    async def main() -> None:
        async with routed([generates(IDS)] * 2, fleet=UNWATCHED, admission={"max_wait_s": 0.1}) as router:
            leases = await bounded(router)
            reply = await router.ask()
            assert (reply.status, reply.error["code"]) == (429, "queue_timeout")
            assert "retry-after" in reply.headers
            give_back(leases)

    run(main)


def test_an_engine_that_was_left_alone_is_tried_when_the_others_are_gone() -> None:
    async def main() -> None:
        async with routed([generates(IDS)] * 2, fleet=UNWATCHED) as router:
            await router.engines[0].__aexit__()
            engine = router.app.fleet.engines["prefill-decode-1"]
            for _ in range(3):
                router.app.fleet.failed(engine, "stalled")
            assert engine.state is EngineState.OPEN
            assert [(await router.ask()).status for _ in range(3)] == [200] * 3
            assert engine.state is EngineState.SUSPECT
            await router.settled()

    run(main)


@pytest.mark.parametrize("left", ["prefill-2", "decode-3"])
def test_what_is_not_generated_finds_another_engine(left: str) -> None:
    """One that prefills, or else one that decodes."""

    async def main() -> None:
        act = answer({"data": []})
        async with routed(prefill=[act] * 3, decode=[act], fleet=UNWATCHED) as router:
            leases = busy(router, Role.PREFILL, "prefill-2")
            for engine in router.engines[: 2 if left == "prefill-2" else 3]:
                await engine.__aexit__()
            assert (await router.ask("/v1/embeddings", input="hi")).status == 200
            hits = [len(engine.asked) for engine in router.engines]
            assert hits == ([0, 0, 1, 0] if left == "prefill-2" else [0, 0, 0, 1])
            give_back(leases)
            await router.settled()

    run(main)


def models(*names: str) -> Act:
    return answer({"object": "list", "data": [{"id": name} for name in names]})


def test_models_are_listed_while_an_engine_of_each_kind_lives() -> None:
    async def main() -> None:
        async with routed([models("one"), models("one"), models("two")], fleet=UNWATCHED) as router:
            for engine, name in zip(router.app.fleet.engines.values(), ("one", "one", "two"), strict=True):
                engine.models = (name,)
            router.app.fleet.changed()
            await router.engines[0].__aexit__()
            reply = await router.ask("/v1/models", method="GET")
            assert [each["id"] for each in reply.json["data"]] == ["one", "two"]
            assert [len(engine.asked) for engine in router.engines] == [0, 1, 1]

    run(main)


def encoder(heard: Callable[[], None]) -> Act:
    async def act(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        heard()
        return await answer({"ec_transfer_params": {"a": 1}})(asked, writer)

    return act


def test_an_encoder_is_found_behind_dead_ones() -> None:
    async def main() -> None:
        heard: list[int] = []
        encoders = [encoder(lambda: heard.append(1))] * 4
        async with routed([answer(completion(Asked("", {}, b"")))], encode=encoders, fleet=UNWATCHED) as router:
            leases = busy(router, Role.ENCODE, "encode-4")
            for engine in router.engines[1:4]:
                await engine.__aexit__()
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
            reply = await router.ask(messages=[{"role": "user", "content": [image]}])
            assert (reply.status, heard) == (200, [1])
            give_back(leases)
            await router.settled()

    run(main)
