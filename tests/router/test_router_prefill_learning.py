"""What the whole router teaches its predictions of prefill."""

import asyncio

import orjson
from routed import COMPLETIONS, LONG, Routed, routed
from scripted_engine import Act, answer, broken, generates, prefilled, streamed
from scripted_stream import stream

from deepinfer_router.api import Kind
from deepinfer_router.autoscale import Autoscale
from deepinfer_router.fleet_view import engines_of, merged_engines
from deepinfer_router.metrics import Registry

EVENTS = stream(Kind.CHAT, [1, 2], [0, 1, 0], with_ids=False)


def learnt(router: Routed) -> int:
    return sum(fit.observations for fit in router.app.prefill.costs.fits.values())


def test_a_stream_tells_how_long_its_prefill_took() -> None:
    async def main() -> None:
        async with routed([streamed(EVENTS)]) as router:
            await router.ask(stream=True)
            await router.settled()
            assert learnt(router) == 1
            (fit,) = router.app.prefill.costs.fits.values()
            assert fit.rejected == 0

    asyncio.run(main())


def test_an_answer_that_comes_whole_tells_nothing_for_its_decode_is_in_it() -> None:
    async def main() -> None:
        async with routed([answer()]) as router:
            await router.ask()
            await router.settled()
            assert learnt(router) == 0

    asyncio.run(main())


def test_a_prefill_of_its_own_tells_what_it_took() -> None:
    async def main() -> None:
        async with routed(prefill=[prefilled()], decode=[generates([0, 1])]) as router:
            reply = await router.ask(COMPLETIONS, prompt=LONG)
            assert reply.status == 200
            await router.settled()
            assert learnt(router) == 1

    asyncio.run(main())


def test_engines_that_fail_or_refuse_tell_nothing() -> None:
    async def main(act: Act) -> None:
        async with routed([act]) as router:
            await router.ask(stream=True)
            await router.settled()
            assert learnt(router) == 0

    asyncio.run(main(broken("reset")))
    asyncio.run(main(answer(status=400)))


def test_groups_see_the_demand_of_what_arrives() -> None:
    async def main() -> None:
        async with routed([answer()]) as router:
            await router.ask()
            (pool,) = router.app.prefill.pools.values()
            assert pool.counts() == [1, 0, 0, 0]

    asyncio.run(main())


def test_what_the_app_says_of_itself_travels_and_scales() -> None:
    async def main() -> None:
        async with routed([streamed(EVENTS)]) as router:
            await router.ask(stream=True)
            said = router.app.status()
            assert orjson.loads(orjson.dumps(said)) == said
            assert said["arrived_tokens"] >= 1
            scale = Autoscale(router.app.config.autoscale.limits(), Registry())
            first = scale.update(merged_engines([engines_of(router.app.fleet)]), [said], 0.0)
            assert first["prefill"]["engines"] == 1

    asyncio.run(main())
