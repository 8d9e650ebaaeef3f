"""The router as one object: every part made from its section of the configuration, and handed to those that use it."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from deepinfer_router import prefill_gauges
from deepinfer_router.admission import Admission
from deepinfer_router.bootstrap import Bootstrap
from deepinfer_router.config import RouterConfig
from deepinfer_router.decode import DecodePolicy
from deepinfer_router.decode_fit import WeightFit
from deepinfer_router.delivery import Delivery
from deepinfer_router.disaggregated import Disaggregated
from deepinfer_router.encode import Encoding
from deepinfer_router.encoder import EncoderPolicy
from deepinfer_router.engine_costs import EngineCosts
from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.entry import Entry
from deepinfer_router.failover import Failover
from deepinfer_router.fleet import Fleet
from deepinfer_router.flow import Flow
from deepinfer_router.handover import Handover, TwoStep
from deepinfer_router.handover_mooncake import Mooncake
from deepinfer_router.media import Encoded
from deepinfer_router.model_list import ModelList
from deepinfer_router.observer import Observer
from deepinfer_router.placement import Placer
from deepinfer_router.prefill import PrefillPolicy
from deepinfer_router.replacement import Replacement
from deepinfer_router.resuming import Resuming
from deepinfer_router.retry_budget import RetryBudget
from deepinfer_router.roles import Role
from deepinfer_router.upstreams import Upstreams
from deepinfer_router.watching import Watching


class App:
    """Answers exchanges. Made and used on one event loop; a worker process has one."""

    def __init__(self, config: RouterConfig, *, seed: int | None = None) -> None:
        """`seed`: of what is drawn at random. Raises RouterConfigError: a setting that cannot work."""
        self.config = config
        loop = asyncio.get_running_loop()
        clock, rng = loop.time, Random(seed)
        self.fleet = Fleet(config.fleet, probed=True, clock=clock)
        self.entry = Entry(config.entry, config.identity, config.store, workers=config.process.workers)
        costs = EngineCosts.from_config(config.prefill)
        self.prefill = PrefillPolicy(config.prefill, costs, config.fleet.slow_start_s)
        self.decode = DecodePolicy(config.decode, config.fleet.slow_start_s, config.process.workers)
        self.upstreams = Upstreams(self.fleet, config.http.timeouts, config.http.engine_tls)
        self.budget = RetryBudget()
        self._unpublish: Callable[[], None] | None = None
        self.admission = Admission(config.admission, self.prefill.lane)
        self.admission.on_waiting = self._tell_of_room
        fit = WeightFit(self.decode, config.decode.kv_weight) if config.decode.fit_kv_weight else None
        self._watching = Watching(
            self.fleet, self.upstreams, config.decode.replicas, config.process.workers, fit, clock
        )
        disaggregation, failure = config.disaggregation, config.failure
        placer = Placer(
            self.fleet, self.prefill, self.decode, local_tokens=disaggregation.local_tokens, clock=clock, rng=rng
        )
        delivery = Delivery(self.fleet, self.upstreams, failure, clock)
        replacement = Replacement(placer, self.admission)
        resuming = Resuming(replacement, self.upstreams, delivery, failure, clock)
        failover = Failover(self.fleet, replacement, self.budget, delivery, resuming, clock)
        bootstrap = None
        handover: Handover
        if disaggregation.connector == "mooncake":
            port = disaggregation.mooncake_bootstrap_port
            handover = mooncake = Mooncake(port)
            bootstrap = Bootstrap(mooncake, port, config.http.timeouts)
        else:
            handover = TwoStep(reusable=disaggregation.connector == "store")
        self.disaggregated = Disaggregated(
            handover, self.fleet, placer, self.upstreams, delivery, failover, bootstrap, clock
        )
        encoding = Encoding(
            self.fleet,
            EncoderPolicy(config.fleet.slow_start_s),
            self.upstreams,
            Encoded(disaggregation.encode_reuse, disaggregation.encode_reuse_s),
            failure.first_token_s,
            clock,
            rng,
        )
        self.observer = Observer(config.access_log, config.tracing, clock)
        self._flow = Flow(
            self.entry,
            self.fleet,
            placer,
            delivery,
            self.disaggregated,
            encoding,
            failover,
            resuming,
            ModelList(self.fleet, self.upstreams),
            self.budget,
            self.admission,
            self.observer,
            failure,
            clock,
        )
        self.gate = self.entry.gate
        """Refuses who may not ask."""
        self.handle = self._flow.handle
        """Answers one exchange: what an `HttpServer` is given."""

    def _tell_of_room(self, some_wait: bool) -> None:
        """Leases that end concern nobody while nobody waits."""
        self.fleet.on_room = self.admission.pump if some_wait else None

    async def start(self) -> None:
        """Know the engines of the configuration, and how they are: those that do not answer get no work yet."""
        for engine in self.config.engines:
            self.fleet.add(
                EngineSpec(
                    engine.url,
                    engine.name,
                    frozenset(engine.roles),
                    engine.models,
                    engine.ranks,
                    engine.capacity_tokens,
                    engine.engine_class,
                )
            )
        self._unpublish = prefill_gauges.publish(self.prefill)
        await self._watching.start()

    def why_not_ready(self) -> str:
        """Why no request could be served now, in one line; empty: it could."""
        for role in (Role.PREFILL, Role.DECODE):
            if not self.fleet.targets(role):
                return f"no engine is open for {role}"
        return ""

    def status(self) -> dict[str, Any]:
        """What the status page shows beside engines and metrics."""
        return {
            "connections": self.upstreams.connections,
            "arrived_seconds": self.prefill.arrived_seconds,
            "arrived_tokens": self.prefill.arrived_tokens,
            "waiting": self.admission.waiting,
            "waiting_seconds": self.admission.waiting_seconds,
            "cuts": self.prefill.cuts(),
            "queues": self.admission.queues(),
            "prefill": prefill_gauges.status(self.prefill),
        }

    def follow(self, cuts: list[dict[str, Any]]) -> None:
        """Serve context lengths by the engines that another worker has chosen."""
        self.prefill.follow(cuts, asyncio.get_running_loop().time())

    def reload(self, config: RouterConfig) -> None:
        """Take over the sections that may change."""
        self.entry.reload(config.identity)
        self.config = config

    def reopen(self) -> None:
        """Log files have been moved away."""
        self.observer.reopen()

    async def close(self) -> None:
        """After the server's drain: nothing is under way. Idempotent."""
        self.admission.close()
        if self._unpublish is not None:
            self._unpublish()
            self._unpublish = None
        await self._watching.stop()
        await self.disaggregated.close()
        await self.entry.close()
        await self.upstreams.close()
        self.observer.close()
