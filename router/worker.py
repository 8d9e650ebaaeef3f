"""A worker: one event loop that serves the port, and does what the supervisor tells it."""

import asyncio
import gc
import logging
import pickle
import signal
import socket
from collections.abc import Callable
from typing import Any, Protocol, cast

from deepinfer_router.channel import Frames, Message, pack
from deepinfer_router.config import RouterConfig
from deepinfer_router.engine_sets import EngineSets
from deepinfer_router.errors import RouterConfigError
from deepinfer_router.exchange import Exchange
from deepinfer_router.fleet import Fleet
from deepinfer_router.fleet_view import engines_of
from deepinfer_router.http_headers import Headers
from deepinfer_router.http_server import HttpServer
from deepinfer_router.loop_lag import LoopLag
from deepinfer_router.metrics import FAST_SECONDS, REGISTRY, histogram

_log = logging.getLogger(__name__)
LAG = histogram("loop_lag_seconds", "How late a timer of the event loop is, ten times a second.", buckets=FAST_SECONDS)


class Application(Protocol):
    """What a worker needs of `app.App`."""

    @property
    def fleet(self) -> Fleet: ...
    async def start(self) -> None: ...
    async def handle(self, exchange: Exchange) -> None: ...
    def gate(self, headers: Headers) -> None: ...
    async def close(self) -> None: ...
    def why_not_ready(self) -> str: ...
    def status(self) -> dict[str, Any]: ...
    def reload(self, config: RouterConfig) -> None: ...
    def follow(self, cuts: list[dict[str, Any]]) -> None: ...
    def reopen(self) -> None: ...


class Worker:
    """Serves until it is told to stop, gets SIGTERM, or the supervisor is gone."""

    def __init__(self, boot: Message, channel: socket.socket, make: Callable[[RouterConfig], Application]) -> None:
        """`boot`: the supervisor's `start`. `make` builds the application, in the running loop."""
        self.index: int = boot["index"]
        self._boot = boot
        self._channel = channel
        self._make = make
        self._early: list[Message] | None = []  # what is told before there is an application

    async def run(self) -> None:
        """Until the last request is answered or cut."""
        loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._grace_s = 0.0
        transport, link = await loop.create_unix_connection(lambda: _Link(self), sock=self._channel)
        self._link = link
        try:
            await self._serve(loop)
        except RouterConfigError as error:
            link.send({"op": "failed", "line": str(error)})
        except OSError as error:
            host, port = self._boot["listen"]
            link.send({"op": "failed", "line": f"{host}:{port}: {error.strerror or error}"})
        finally:
            transport.close()

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        config: RouterConfig = pickle.loads(self._boot["config"])
        self._grace_s = config.process.drain_s
        self._app = app = self._make(config)
        self._sets = EngineSets(app.fleet)
        for source, engines in self._boot["engines"].items():
            self._sets.set(source, engines)
        for engine in self._boot["drained"]:
            self._sets.drain(engine, True)
        for message in self._early or ():
            self._obey(message)
        self._early = None
        await app.start()
        try:
            self._tls = config.http.tls
            self._context = self._tls.context() if self._tls else None
            self._server = server = HttpServer(app.handle, config.http.limits, self._context, app.gate)
            host, port = self._boot["listen"]
            await server.listen(host, port, reuse_port=True)
            loop.add_signal_handler(signal.SIGTERM, self._ending.set)
            loop.add_signal_handler(signal.SIGINT, lambda: None)  # the supervisor's: a terminal sends it to both
            self._link.send(self._report())
            self._link.send({"op": "ready"})
            gc.collect()
            gc.freeze()  # what is there now stays: looking at it again took 10 ms a time
            # Requests leave no cycles, and looking for them took a tenth of their time; streams that clients leave do,
            # when they are in the oldest generation already: 100,000 objects, about 10 MB, wait there at most.
            gc.set_threshold(10_000, 2, 5)
            lag = LoopLag(LAG.labels().observe)
            await self._ending.wait()
            await server.drain(self._grace_s)
            lag.stop()
        finally:
            await app.close()

    def told(self, message: Message) -> None:
        """One message of the supervisor."""
        if message["op"] == "stop":
            self._grace_s = message["grace_s"]
            self._ending.set()
        elif self._early is not None:
            self._early.append(message)
        else:
            self._obey(message)

    def _obey(self, message: Message) -> None:
        operation = message["op"]
        if operation == "report":
            self._sets.sweep()
            self._link.send(self._report())
        elif operation == "engines":
            self._sets.set(message["source"], message["engines"])
        elif operation == "follow":
            self._app.follow(message["cuts"])
        elif operation == "drain":
            self._sets.drain(message["engine"], message["on"])
        elif operation == "reopen":
            self._app.reopen()
            if self._tls and self._context:
                self._tls.renew(self._context)
        elif operation == "apply":
            self._app.reload(pickle.loads(message["config"]))

    def alone(self) -> None:
        """The supervisor has gone: finish, so that its successor has the port to itself."""
        self._ending.set()

    def _report(self) -> Message:
        return {
            "op": "report",
            "why_not_ready": self._app.why_not_ready(),
            "connections": len(self._server.connections),
            "requests": len(self._server.tasks),
            "engines": engines_of(self._app.fleet),
            "status": self._app.status(),
            "metrics": REGISTRY.snapshot(),
        }


class _Link(asyncio.Protocol):
    """The worker's end of the channel."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._frames = Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def send(self, message: Message) -> None:
        if not self._transport.is_closing():
            self._transport.write(pack(message))

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            try:
                self._worker.told(message)
            except RouterConfigError as error:
                self.send({"op": "refused", "line": f"worker {self._worker.index}: {error}"})
            except Exception as error:
                _log.exception("told by the supervisor: %s", message["op"])
                self.send({"op": "refused", "line": f"{message['op']} failed in a worker: {error!r}"})

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.alone()
