"""Leases of answers without a stream: their prefill is over when it was predicted to be."""

import asyncio
from collections.abc import Callable

from router_http_case import until

from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.fleet import Fleet
from deepinfer_router.fleet_config import FleetConfig
from deepinfer_router.prefill_guess import PrefillGuess
from deepinfer_router.roles import Role
from deepinfer_router.work import Work


def guessing(body: Callable[[Fleet, PrefillGuess], object]) -> None:
    async def run() -> None:
        fleet = Fleet(FleetConfig(), clock=asyncio.get_running_loop().time)
        await body(fleet, PrefillGuess())  # type: ignore[misc]

    asyncio.run(run())


def test_seconds_are_taken_off_in_the_order_of_their_ends() -> None:
    async def body(fleet: Fleet, guess: PrefillGuess) -> None:
        [target] = fleet.add(EngineSpec(id="a", url="http://a:1")).targets
        begun = asyncio.get_running_loop().time()
        leases = [fleet.book(target, Work(prompt_tokens=10), Role.DECODE, seconds) for seconds in (0.3, 0.1, 60.0)]
        for lease, seconds in zip(leases, (0.3, 0.1, 60.0), strict=True):
            guess.expect(lease, begun + seconds)
        assert target.pending_seconds > 60.3
        await until(lambda: leases[1].held_tokens)
        assert asyncio.get_running_loop().time() >= begun + 0.1
        await until(lambda: leases[0].held_tokens)
        assert asyncio.get_running_loop().time() >= begun + 0.3
        assert leases[2].held_tokens == 0 and target.pending_seconds == 60.0
        for lease in leases:
            lease.release()
        await until(lambda: guess._timer is None)
        assert guess._due == []
        assert (target.active, target.kv_tokens, target.pending_seconds, target.held_tokens) == (0, 0, 0.0, 0)

    guessing(body)


def test_what_is_over_is_left_alone_and_a_new_one_wakes_it_again() -> None:
    async def body(fleet: Fleet, guess: PrefillGuess) -> None:
        [target] = fleet.add(EngineSpec(id="a", url="http://a:1")).targets
        for _ in range(2):
            lease = fleet.book(target, Work(prompt_tokens=10), Role.DECODE, 60.0)
            guess.expect(lease, asyncio.get_running_loop().time() + 60.0)
            lease.release()
            await until(lambda: guess._timer is None)
            assert (lease.held_tokens, target.pending_seconds) == (0, 0.0)

    guessing(body)
