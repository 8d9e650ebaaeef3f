"""Ten thousand streams that say nothing: what each of them keeps, and that all of it is given back."""

import asyncio
import gc
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import uvloop
from router_http_case import until

from deepinfer_router.exchange import Exchange
from deepinfer_router.http_client import Upstream
from deepinfer_router.http_config import Timeouts
from deepinfer_router.http_server import HttpServer
from deepinfer_router.relay import relay

STREAMS = 10_000
SPARE_FILES = 500
STREAM_BYTES = 16 << 10
"""Of the router's memory for one stream: two sockets, two protocols, a task, a request and the head of an answer."""

# A process each, since a process may open only so many files.
PEERS = textwrap.dedent(
    """
    import asyncio, sys
    HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
    EVENT = HEAD + b"4\\r\\n:a\\n\\n\\r\\n"
    REQUEST = b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: a\\r\\ncontent-length: 2\\r\\n\\r\\n{}"

    class Engine(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport
        def data_received(self, data):
            self.transport.write(EVENT)

    class Client(asyncio.Protocol):
        seen = 0
        def connection_made(self, transport):
            self.data = b""
            transport.write(REQUEST)
        def data_received(self, data):
            self.data += data
            if self.data.endswith(b":a\\n\\n\\r\\n"):
                Client.seen += 1

    async def engine():
        server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.Event().wait()

    async def clients(port, count):
        kept = []
        for start in range(0, count, 50):
            loop = asyncio.get_running_loop()
            some = range(start, min(count, start + 50))
            kept += await asyncio.gather(*[loop.create_connection(Client, "127.0.0.1", port) for _ in some])
        for _ in range(6000):
            if Client.seen == count:
                break
            await asyncio.sleep(0.05)
        print("all" if Client.seen == count else f"{Client.seen} of {count}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(engine() if sys.argv[1] == "engine" else clients(*map(int, sys.argv[2:])))
    """
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def streams() -> int:
    """As many as may be open: STREAMS where the limit on files lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = len(os.listdir("/proc/self/fd")) + SPARE_FILES  # what tests before this one left open
    wanted = 2 * STREAMS + others
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    return min(STREAMS, (most - others) // 2)


def peer(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", PEERS, *arguments], stdout=subprocess.PIPE, text=True)


def test_ten_thousand_idle_streams(streams: int) -> None:
    engine = peer("engine")
    assert engine.stdout
    engine_port = int(engine.stdout.readline())

    async def run() -> None:
        upstream = Upstream(f"http://127.0.0.1:{engine_port}", Timeouts(connect_s=60.0))
        outcomes: list[str] = []

        async def handler(exchange: Exchange) -> None:
            response = await upstream.send(exchange.method, exchange.path, exchange.headers, exchange.body)
            outcomes.append(await relay(response, exchange, stall_s=600.0))

        server = HttpServer(handler)
        port = await server.listen("127.0.0.1", 0)
        gc.collect()
        before = resident_bytes()
        clients = await asyncio.to_thread(peer, "clients", str(port), str(streams))
        try:
            assert clients.stdout
            assert await asyncio.to_thread(clients.stdout.readline) == "all\n"
            assert len(server.tasks) == len(server.connections) == upstream.connections == streams
            each = (resident_bytes() - before) / streams
            assert each < STREAM_BYTES
        finally:
            clients.kill()
            clients.wait()
        await until(lambda: not server.tasks and not server.connections and upstream.connections == 0)
        assert outcomes == ["client_gone"] * streams
        await server.drain(0)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    finally:
        engine.kill()
        engine.wait()
