"""Prefill of a fleet of expert-parallel groups in virtual time: what a choice of engines is worth in time to first
token.

A group's data-parallel ranks step together: a step takes as long as its slowest rank's chunk, and a prompt that comes
during a step waits for the next. Each rank computes its prompts first come, first served. A prompt's first token comes
with the step that ends it. One rank a group is an independent engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from deepinfer_costmodel.cost import Cost
from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.fleet import Fleet
from deepinfer_router.fleet_config import FleetConfig
from deepinfer_router.roles import Role
from deepinfer_router.target import Target
from deepinfer_router.work import Work
from deepinfer_simulator.baselines_prefix import TraceWork
from deepinfer_simulator.chunks import Chunking, Plan, Prompt
from deepinfer_simulator.events import EventQueue
from deepinfer_simulator.policy import Policy
from deepinfer_simulator.traces import TraceRequest

Arrive = Callable[[Work, Sequence[Target], float], float]

COST = Cost(alpha=0.066 / 16, beta=0.0570e-3 / 4, gamma=2 * 0.004406e-6 / 16)
"""Of one rank. vllm-project/router publishes 0.066 + 0.0570 k + 0.004406 k^2 seconds for k thousand tokens; the linear
part over 4 and the others over 16 give 8,192 tokens 0.14 s and 128,000 tokens 6.3 s. They rank policies and predict no
machine."""


@dataclass(frozen=True, slots=True)
class Served:
    """A prompt whose first token has come."""

    request: TraceRequest
    seconds: float
    """Until its first token."""
    engine: str
    rank: int


@dataclass(slots=True)
class PrefillRun:
    """What a run came to."""

    served: list[Served] = field(default_factory=list)
    computed_s: float = 0.0
    """Seconds of chunks, over all ranks."""
    stepped_s: float = 0.0
    """Seconds of steps, times ranks: what the same groups could have computed while they were busy."""

    @property
    def efficiency(self) -> float:
        """Of lock-step: computed over stepped. Offered load above it cannot be served."""
        return self.computed_s / self.stepped_s if self.stepped_s else 1.0


class _Group:
    """An engine: its ranks' queues, and whether a step runs."""

    def __init__(self, ranks: int) -> None:
        self.queues: list[deque[Prompt]] = [deque() for _ in range(ranks)]
        self.stepping = False


class PrefillModel:
    """`groups` engines of `ranks` data-parallel ranks, counted by the router's own Fleet. Use once."""

    def __init__(self, groups: int, ranks: int, chunking: Chunking, cost: Cost = COST) -> None:
        self._chunking, self._cost, self._ranks = chunking, cost, ranks
        self._events = EventQueue()
        self._run = PrefillRun()
        self._fleet = Fleet(FleetConfig(slow_start_s=0), clock=lambda: self._events.now)
        self._groups: dict[str, _Group] = {}
        for number in range(groups):
            name = f"engine-{number:03}"
            spec = EngineSpec(f"http://{name}", name, frozenset((Role.PREFILL,)), ranks=ranks)
            self._groups[self._fleet.add(spec).id] = _Group(ranks)

    @property
    def targets(self) -> Sequence[Target]:
        """Every rank of every engine."""
        return self._fleet.targets(Role.PREFILL)

    def run(
        self, arrivals: Iterable[TraceRequest], policy: Policy, rng: Random, arrive: Arrive | None = None
    ) -> PrefillRun:
        """Serve every arrival, in order of time. `arrive`: told of each before it is placed, as PrefillPolicy wants.

        Raises ValueError where the policy places nothing on a fleet that is whole.
        """
        self._await(iter(arrivals), policy, rng, arrive)
        self._events.run()
        return self._run

    def _await(self, coming: Iterator[TraceRequest], policy: Policy, rng: Random, arrive: Arrive | None) -> None:
        """Have the next of `coming` arrive when it does."""
        request = next(coming, None)
        if request is None:
            return

        def happen() -> None:
            self._place(request, policy, rng, arrive)
            self._await(coming, policy, rng, arrive)

        self._events.at(request.at, happen)

    def _place(self, request: TraceRequest, policy: Policy, rng: Random, arrive: Arrive | None) -> None:
        now, targets = self._events.now, self.targets
        work = TraceWork(
            prompt_tokens=request.input_tokens,
            hit_tokens=request.hit_tokens,
            session=request.session,
            elements=request.blocks,
        )
        if arrive is not None:
            arrive(work, targets, now)
        pick = policy.pick(work, targets, now, rng)
        if pick is None:
            raise ValueError(f"{type(policy).__name__} has no target for {work.prompt_tokens} tokens at {now:.3f} s")
        seconds = pick.cost_seconds or self._cost.seconds(work.uncached_tokens, work.hit_tokens)
        lease = self._fleet.book(pick.target, work, Role.PREFILL, seconds)
        group = self._groups[pick.target.engine.id]
        prompt = Prompt(request, lease, left=work.uncached_tokens, done=work.hit_tokens)
        group.queues[pick.target.rank].append(prompt)
        if not group.stepping:
            self._step(group)

    def _step(self, group: _Group) -> None:
        plans = [self._chunking.plan(queue, self._cost) for queue in group.queues if queue]
        group.stepping = bool(plans)
        if not plans:
            return
        slowest = max(seconds for _, seconds in plans)
        self._run.computed_s += sum(seconds for _, seconds in plans)
        self._run.stepped_s += slowest * self._ranks
        self._events.at(self._events.now + slowest, lambda: self._end(group, plans))

    def _end(self, group: _Group, plans: list[Plan]) -> None:
        for prompt, tokens in (part for plan, _ in plans for part in plan):
            prompt.left -= tokens
            prompt.done += tokens
            if not prompt.left:
                target = prompt.lease.target
                group.queues[target.rank].popleft()
                prompt.lease.release()
                request = prompt.request
                self._run.served.append(Served(request, self._events.now - request.at, target.engine.id, target.rank))
        self._step(group)
