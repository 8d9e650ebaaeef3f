"""A router beside a test that blocks."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from deepinfer_router.app import App
from deepinfer_router.config import RouterConfig
from deepinfer_router.http_server import HttpServer

T = TypeVar("T")


class Router:
    """A router in this process, on a thread of its own."""

    def __init__(self, engines: list[dict[str, Any]], **config: Any) -> None:
        self._config = RouterConfig.model_validate({"engines": engines, **config})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> "Router":
        self._thread.start()
        port = self.call(self._start())
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(300)

    async def left(self) -> int:
        """What the router believes to be at engines."""
        return sum(target.active for engine in self.app.fleet.engines.values() for target in engine.targets)

    async def _start(self) -> int:
        self.app = App(self._config, seed=0)
        await self.app.start()
        self._server = HttpServer(self.app.handle)
        return await self._server.listen("127.0.0.1", 0)

    async def _stop(self) -> None:
        await self._server.drain(0)
        await self.app.close()
