"""Deadlines of many things by one timer, and how late the loop is."""

import asyncio
import logging
import time

import pytest
from router_http_case import until

from deepinfer_router.deadlines import NEVER, TICK_S, Deadlines
from deepinfer_router.loop_lag import LoopLag


class Thing:
    def __init__(self, deadline: float = NEVER, again_s: float | None = None) -> None:
        self.deadline = deadline
        self.again_s = again_s
        self.expiries: list[float] = []

    def expired(self, now: float) -> None:
        self.expiries.append(now)
        self.deadline = NEVER if self.again_s is None else now + self.again_s


def test_deadlines_are_noticed_once_and_never_early() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        deadlines = Deadlines(loop)
        begun = loop.time()
        soon, later, never, forgotten = Thing(begun), Thing(begun + 0.6), Thing(), Thing(begun)
        for thing in (soon, later, never, forgotten):
            deadlines.watch(thing)
        deadlines.forget(forgotten)
        deadlines.forget(forgotten)
        assert deadlines.now >= begun
        await until(lambda: later.expiries)
        assert len(soon.expiries) == len(later.expiries) == 1 and later.expiries[0] >= begun + 0.6
        assert never.expiries == forgotten.expiries == []
        for thing in (soon, later, never):
            deadlines.forget(thing)
        await until(lambda: deadlines._timer is None)
        again = Thing(loop.time())
        deadlines.watch(again)
        await until(lambda: again.expiries)

    asyncio.run(run())


def test_one_that_fails_is_watched_no_more_and_spoils_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Thing):
        def expired(self, now: float) -> None:
            super().expired(now)
            raise ValueError("no")

    async def run() -> None:
        deadlines = Deadlines(asyncio.get_running_loop())
        failing, steady = Failing(0.0, again_s=0.0), Thing(0.0, again_s=0.0)
        deadlines.watch(failing)
        deadlines.watch(steady)
        await until(lambda: len(steady.expiries) == 3)
        assert len(failing.expiries) == 1

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(run())
    assert TICK_S < 1


def test_a_busy_loop_is_seen() -> None:
    async def run() -> None:
        lags: list[float] = []
        probe = LoopLag(lags.append, interval_s=0.01)
        await until(lambda: lags)
        time.sleep(0.3)
        await until(lambda: max(lags) > 0.2)
        probe.stop()
        count = len(lags)
        await asyncio.sleep(0.05)
        assert len(lags) == count and min(lags) >= 0

    asyncio.run(run())
