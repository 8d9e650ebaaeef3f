"""Connections to engines that are opened and not used, or not in time."""

import asyncio
from collections.abc import Callable

import pytest
from router_http_case import Proxy, ask, case, silent, until

from deepinfer_router.engine_connection import EngineConnection
from deepinfer_router.http_client import UpstreamError
from deepinfer_router.http_config import Timeouts


def test_a_connection_that_nobody_uses_is_closed() -> None:
    """Its task was cancelled as it was made."""

    async def run(proxy: Proxy) -> None:
        await proxy.upstream.open(lambda: EngineConnection(proxy.upstream))
        assert proxy.upstream.connections == 1
        await until(lambda: proxy.upstream.connections == 0)

    case(run, timeouts=Timeouts(idle_s=0.1))


@pytest.mark.parametrize("times", [1, 2])
def test_a_fresh_connection_that_closed_before_it_was_used_is_replaced_once(times: int) -> None:
    """A loop with so much to do that a connection is idle for too long before the task that opened it runs."""

    async def run(proxy: Proxy) -> None:
        opened: list[EngineConnection] = []
        connect = proxy.upstream.open

        async def late(protocol: Callable[[], asyncio.BaseProtocol]) -> asyncio.BaseProtocol:
            connection = await connect(protocol)
            assert isinstance(connection, EngineConnection)
            opened.append(connection)
            if len(opened) <= times:
                connection.expired(connection.deadline)
            return connection

        proxy.upstream.open = late  # type: ignore[method-assign]
        answer = await ask(proxy.port, b"POST", b"/", b"{}")
        assert len(opened) == 2
        if times == 1:
            assert (answer.status, answer.body) == (200, b"POST / {}")
        else:
            [error] = proxy.outcomes
            assert isinstance(error, UpstreamError) and (error.kind, error.sent) == ("reset", False)
        assert len(proxy.engine.requests) == 2 - times

    case(run)


def test_whenever_its_opening_is_cancelled_no_connection_stays() -> None:
    """A client that leaves in that moment; uvloop closes such a connection, and does not tell its protocol."""

    async def run(proxy: Proxy) -> None:
        proxy.engine.script = silent
        for steps in range(12):
            waiting = asyncio.create_task(proxy.upstream.send(b"GET", b"/", [], b""))
            for _ in range(steps):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda: proxy.upstream.connections == 0 and not proxy.engine.open)

    case(run)
