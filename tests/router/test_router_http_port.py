"""One port for several processes."""

import pytest
from router_http_case import Proxy, ask, case

from deepinfer_router.http_server import HttpServer


def test_two_processes_may_share_a_port() -> None:
    async def run(proxy: Proxy) -> None:
        first, second = HttpServer(proxy.server.handler), HttpServer(proxy.server.handler)
        port = await first.listen("127.0.0.1", 0, reuse_port=True)
        assert await second.listen("127.0.0.1", port, reuse_port=True) == port
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await HttpServer(proxy.server.handler).listen("127.0.0.1", port)
        assert (await ask(port)).status == 200
        await first.drain(0)
        await second.drain(0)

    case(run)
