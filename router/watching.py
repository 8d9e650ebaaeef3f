"""What keeps the view of the fleet fresh while nobody asks: probes of health, polls of load, other workers' counts."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from deepinfer_router.decode_fit import WeightFit
from deepinfer_router.fleet import Fleet
from deepinfer_router.meeting_place import leave, meeting_place
from deepinfer_router.polls import Polls
from deepinfer_router.probes import Probes
from deepinfer_router.shared_counts import SharedCounts
from deepinfer_router.target import Engine
from deepinfer_router.upstreams import Upstreams

logger = logging.getLogger(__name__)


class Watching:
    """All three, over the connections that requests use too. The event loop's thread only."""

    def __init__(
        self,
        fleet: Fleet,
        upstreams: Upstreams,
        replicas: int,
        workers: int,
        fit: WeightFit | None,
        clock: Callable[[], float],
    ) -> None:
        """`replicas`: routers on other hosts, and this one. `workers`: processes of this one, children of one parent.

        `fit`: hears what tokens take.
        """
        self._fleet = fleet
        self._upstreams = upstreams
        self._workers = workers
        self._clock = clock
        self._directory: Path | None = None
        self._shared: SharedCounts | None = None
        self._probes = Probes(fleet, self._fetch, clock).rounds
        observe = None if fit is None else fit.observe
        self._polls = Polls(fleet, self._fetch, clock, replicas, observe, self._leads).rounds
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Once now, so that the first requests find engines; then on and on."""
        if self._workers > 1:
            self._share()
        await self._probes.once()
        if self._shared is not None:
            self._shared.fold()
        if self._leads():
            await self._polls.once()
        running = [self._probes.run(), self._polls.run()]
        if self._shared is not None:
            running.append(self._shared.run())
        self._tasks = [asyncio.create_task(work) for work in running]

    async def stop(self) -> None:
        """Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._shared is not None and self._directory is not None:
            self._shared.close()
            leave(self._directory)

    def _share(self) -> None:
        try:
            self._directory = meeting_place(os.getppid())
            self._shared = SharedCounts(self._fleet, self._directory, self._clock)
        except OSError as error:
            logger.warning("workers do not see each other's requests, and balance worse: %s", error)

    def _leads(self) -> bool:
        return self._shared is None or self._shared.leads

    async def _fetch(self, engine: Engine, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Raises UpstreamError."""
        response = await self._upstreams.of(engine).send(b"GET", path.encode(), [], b"")
        return response.status, await response.read(most_bytes)
