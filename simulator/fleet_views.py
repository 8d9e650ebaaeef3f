"""Replicas of the router with its own accounts: leases for what each has sent, polls for what the others have there."""

from __future__ import annotations

import asyncio

from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.fleet import Fleet
from deepinfer_router.fleet_config import FleetConfig
from deepinfer_router.lease import Lease
from deepinfer_router.polls import Polls
from deepinfer_router.roles import Role
from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work
from deepinfer_simulator.decode_views import Loads

CAPACITY_TOKENS = 1 << 30
"""Of a rank, in the metrics that are polled: far more than is ever held, so that nothing is refused."""


class FleetViews:
    """`replicas` routers in front of one engine of `ranks`; all poll its metrics at once, every `poll` seconds.

    Counts are kept by the router's own Fleet, Lease and Polls: a replica knows at once of what it sends and of what
    comes back to it, and of the others what they had at the last poll. Tokens that it has relayed it counts when it
    polls, and not one by one. Workers that share their counts are one replica.
    """

    def __init__(self, ranks: int, replicas: int, poll: float) -> None:
        self.ranks, self.replicas, self._poll = ranks, replicas, poll
        self._now, self._due, self._step = 0.0, 0.0, 0
        self._page = b""
        config = FleetConfig(slow_start_s=0)  # a fleet that has run for long
        self._fleets = [Fleet(config, clock=self._clock) for _ in range(replicas)]
        spec = EngineSpec(url="http://engine", roles=frozenset((Role.DECODE,)), ranks=ranks)
        self._engines = [fleet.add(spec) for fleet in self._fleets]
        self._polls = [Polls(fleet, self._fetch, self._clock, replicas) for fleet in self._fleets]
        self._leases: dict[Lease, int] = {}  # and the step up to which its tokens are counted

    def tick(self, now: float, count: Loads, kv: Loads) -> None:
        self._now = now
        self._step += 1
        if now < self._due:
            return
        self._due += self._poll * (1 + (now - self._due) // self._poll)
        for lease, counted in self._leases.items():
            lease.tokens(self._step - counted)
            self._leases[lease] = self._step
        self._page = _metrics(count.tolist(), kv.tolist())
        asyncio.run(self._ask())

    def targets(self, replica: int) -> list[Target]:
        return self._engines[replica].targets

    def book(self, replica: int, target: Target, work: Work) -> Lease:
        lease = self._fleets[replica].book(target, work, Role.DECODE)
        lease.first_token()
        self._leases[lease] = self._step
        return lease

    def release(self, booking: Lease) -> None:
        del self._leases[booking]
        booking.release()

    def _clock(self) -> float:
        return self._now

    async def _ask(self) -> None:
        for polls, engine in zip(self._polls, self._engines, strict=True):
            await polls.ask(engine)

    async def _fetch(self, engine: Engine, path: str, most: int) -> tuple[int, bytes]:
        return 200, self._page


def _metrics(count: list[int], kv: list[int]) -> bytes:
    """What vLLM's /metrics says of every rank."""
    lines = []
    for rank, (active, held) in enumerate(zip(count, kv, strict=True)):
        # half a token more, which is cut off: a share times the capacity would often be a token less
        share = (held + 0.5) / CAPACITY_TOKENS
        lines += [
            f'vllm:num_requests_running{{engine="{rank}"}} {active}',
            f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {share!r}',
            f'vllm:cache_config_info{{engine="{rank}",kv_cache_size_tokens="{CAPACITY_TOKENS}"}} 1',
        ]
    return "\n".join(lines).encode()
