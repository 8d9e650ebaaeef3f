"""A worker whose application answers by itself, so that tests of the supervisor need no engines.

/pid: the worker's; /engines: ids and states; /followed: pids of workers followed; /slow: once there is a file `go`
where it runs; /kill: none, it dies; /spin: none, it is stuck.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from deepinfer_router.channel import receive
from deepinfer_router.config import RouterConfig
from deepinfer_router.exchange import Exchange
from deepinfer_router.fleet import Fleet
from deepinfer_router.http_headers import Headers
from deepinfer_router.metrics import counter
from deepinfer_router.worker import Worker

ANSWERS = counter("bare_answers", "Answers.").labels()


class BareApp:
    def __init__(self, config: RouterConfig) -> None:
        self.fleet = Fleet()
        self.config = config
        self.followed: list[dict[str, Any]] = []

    async def start(self) -> None:
        if self.config.identity.everybody.tenant == "cannot start":
            raise OSError(98, "Address already in use")

    async def close(self) -> None:
        pass

    async def handle(self, exchange: Exchange) -> None:
        answer: Any = os.getpid()
        if exchange.route == b"/slow":
            while not Path("go").exists():
                await asyncio.sleep(0.02)
        elif exchange.route == b"/kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif exchange.route == b"/spin":
            while True:
                pass
        elif exchange.route == b"/engines":
            answer = {engine.id: engine.state for engine in self.fleet.engines.values()}
        elif exchange.route == b"/followed":
            answer = [cut["pid"] for cut in self.followed]
        elif exchange.route == b"/tenant":
            answer = self.config.identity.everybody.tenant
        ANSWERS.inc()
        exchange.respond(200, [], json.dumps(answer).encode())

    def gate(self, headers: Headers) -> None:
        pass

    def why_not_ready(self) -> str:
        return "" if self.fleet.engines else "no engine"

    def status(self) -> dict[str, Any]:
        return {"cuts": [{"models": [], "pid": os.getpid()}]}

    def follow(self, cuts: list[dict[str, Any]]) -> None:
        self.followed = cuts

    def reload(self, config: RouterConfig) -> None:
        self.config = config

    def reopen(self) -> None:
        pass


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    boot = receive(channel)
    channel.setblocking(False)
    asyncio.run(Worker(boot, channel, BareApp).run())
