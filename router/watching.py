"""What keeps the view of the fleet fresh while nobody asks: probes of health and polls of load."""

import asyncio
from collections.abc import Callable

from deepinfer_router.fleet import Fleet
from deepinfer_router.polls import Polls
from deepinfer_router.probes import Probes
from deepinfer_router.target import Engine
from deepinfer_router.upstreams import Upstreams


class Watching:
    """Both, over the connections that requests use too. The event loop's thread only."""

    def __init__(self, fleet: Fleet, upstreams: Upstreams, replicas: int, clock: Callable[[], float]) -> None:
        """`replicas`: routers on other hosts, and this one."""
        self._upstreams = upstreams
        self._rounds = (
            Probes(fleet, self._fetch, clock).rounds,
            Polls(fleet, self._fetch, clock, replicas).rounds,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Once now, so that the first requests find engines; then on and on."""
        for rounds in self._rounds:
            await rounds.once()
        self._tasks = [asyncio.create_task(rounds.run()) for rounds in self._rounds]

    async def stop(self) -> None:
        """Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _fetch(self, engine: Engine, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Raises UpstreamError."""
        response = await self._upstreams.of(engine).send(b"GET", path.encode(), [], b"")
        return response.status, await response.read(most_bytes)
