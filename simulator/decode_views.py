"""What replicas of a router know of the ranks' loads: all of it, or the last poll and what they sent since."""

from __future__ import annotations

from typing import Any, Protocol

from deepinfer_router.target import Engine, Target
from deepinfer_router.work import Work

Loads = Any  # numpy.ndarray of int64, [ranks]


class Views(Protocol):
    """The targets that each replica's policy reads, kept up to date by the model."""

    ranks: int
    replicas: int

    def tick(self, now: float, count: Loads, kv: Loads) -> None:
        """A step begins, with these true requests and KV tokens of every rank."""

    def targets(self, replica: int) -> list[Target]:
        """One a rank, in order."""
        ...

    def book(self, replica: int, target: Target, work: Work) -> Any:
        """The replica has sent `work` there."""

    def release(self, booking: Any) -> None:
        """What was booked has ended."""


def fresh_targets(ranks: int, capacity_tokens: int | None = None) -> list[Target]:
    """Ranks of one expert-parallel engine."""
    engine = Engine("engine", "http://engine")
    engine.targets = [Target(engine, rank, capacity_tokens=capacity_tokens) for rank in range(ranks)]
    return engine.targets


class ExactView:
    """Everyone knows everything: one router, or workers of one host with shared counts. Prompts count as they come."""

    def __init__(self, ranks: int, replicas: int = 1) -> None:
        self.ranks, self.replicas = ranks, replicas
        self._targets = fresh_targets(ranks)

    def tick(self, now: float, count: Loads, kv: Loads) -> None:
        _copy(count, kv, self._targets)

    def targets(self, replica: int) -> list[Target]:
        return self._targets

    def book(self, replica: int, target: Target, work: Work) -> None:
        target.active += 1
        target.kv_tokens += work.prompt_tokens

    def release(self, booking: None) -> None:
        pass


class PolledViews:
    """All replicas poll all ranks at once, every `poll` seconds, which is the worst case; each adds what it has sent
    since."""

    def __init__(self, ranks: int, replicas: int, poll: float) -> None:
        self.ranks, self.replicas, self._poll = ranks, replicas, poll
        self._targets = [fresh_targets(ranks) for _ in range(replicas)]
        self._due = 0.0

    def tick(self, now: float, count: Loads, kv: Loads) -> None:
        if now < self._due:
            return
        self._due += self._poll * (1 + (now - self._due) // self._poll)
        for targets in self._targets:
            _copy(count, kv, targets)

    def targets(self, replica: int) -> list[Target]:
        return self._targets[replica]

    def book(self, replica: int, target: Target, work: Work) -> None:
        target.active += 1
        target.kv_tokens += work.prompt_tokens

    def release(self, booking: None) -> None:
        pass


def _copy(count: Loads, kv: Loads, targets: list[Target]) -> None:
    for target, active, tokens in zip(targets, count.tolist(), kv.tolist(), strict=True):
        target.active = active
        target.kv_tokens = tokens
