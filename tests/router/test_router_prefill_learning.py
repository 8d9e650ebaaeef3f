"""What the whole router teaches its predictions of prefill."""

import asyncio

import orjson
import pytest
from routed import COMPLETIONS, LONG, Routed, routed
from scripted_engine import Act, answer, broken, generates, prefilled, streamed
from scripted_stream import stream

from deepinfer_router.api import Kind
from deepinfer_router.autoscale import Autoscale
from deepinfer_router.fleet_view import engines_of, merged_engines
from deepinfer_router.metrics import Registry
from deepinfer_router.roles import Role
from deepinfer_router.work import Work

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


def test_a_long_answer_makes_no_engine_look_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM#40202: first-token times divided by the answer's tokens preferred slow engines with much to say."""
    learnt_s: list[float] = []

    async def main() -> None:
        async with routed([generates([0, 1] * 100, first_s=0.3)]) as router:

            def observe(kind: str, q: int, c: int, waited_s: float, seconds: float, now: float) -> None:
                learnt_s.append(seconds - waited_s)

            monkeypatch.setattr(router.app.prefill.costs, "observe", observe)
            await router.ask(stream=True)
            await router.settled()

    asyncio.run(main())
    assert len(learnt_s) == 1 and learnt_s[0] >= 0.3


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


def test_a_group_with_enough_to_do_holds_up_no_other() -> None:
    async def main() -> None:
        acts = [prefilled(), prefilled()]
        async with routed(prefill=acts, decode=[generates([0, 1])]) as router:
            policy, fleet = router.app.prefill, router.app.fleet
            targets, now = fleet.targets(Role.PREFILL), asyncio.get_running_loop().time()
            for tokens in (1_000, 300_000) * 32:
                policy.arrive(Work(prompt_tokens=tokens, hit_tokens=tokens - 100), targets, now - 30.0)
            policy.arrive(Work(prompt_tokens=1), targets, now)
            (pool,) = policy.pools.values()
            (short,), (long,) = pool.engines_of(0), pool.engines_of(3)
            leases = [
                fleet.book(engine.targets[0], Work(), Role.PREFILL, seconds)
                for engine, seconds in ((short, 5.0), (long, 5000.0))
            ]
            waits = asyncio.create_task(router.ask(COMPLETIONS, prompt="many words " * 150_000))
            while not router.app.admission.waiting and not waits.done():
                await asyncio.sleep(0.01)
            assert (await router.ask(COMPLETIONS, prompt=LONG)).status == 200
            assert router.app.admission.waiting == 1
            for lease in leases:
                lease.release()
            assert (await waits).status == 200
            await router.settled()

    asyncio.run(main())
