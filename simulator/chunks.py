"""What a rank computes in one step: chunks of its oldest prompts, by tokens as stock vLLM or by predicted time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from deepinfer_costmodel.cost import Cost
from deepinfer_router.lease import Lease
from deepinfer_simulator.traces import TraceRequest


@dataclass(slots=True, eq=False)
class Prompt:
    """A request on its rank."""

    request: TraceRequest
    lease: Lease
    """What the router counts for it."""
    left: int
    """Tokens still to compute."""
    done: int
    """Tokens in the cache: those that were there when it came, and those computed since."""


Plan = tuple[list[tuple[Prompt, int]], float]
"""(prompt, tokens of it) of a step, and the seconds of all of them."""


class Chunking(Protocol):
    """How much of a queue goes into the next step."""

    def plan(self, queue: Iterable[Prompt], cost: Cost) -> Plan:
        """Oldest first, at least one token."""
        ...


@dataclass(frozen=True)
class FixedChunks:
    """At most `tokens` a step, whatever they cost: vLLM's max_num_batched_tokens."""

    tokens: int = 8192

    def plan(self, queue: Iterable[Prompt], cost: Cost) -> Plan:
        """See Chunking."""
        room, seconds = self.tokens, cost.alpha
        chosen: list[tuple[Prompt, int]] = []
        for prompt in queue:
            taken = min(prompt.left, room)
            chosen.append((prompt, taken))
            seconds += cost.seconds(taken, prompt.done) - cost.alpha
            room -= taken
            if not room:
                break
        return chosen, seconds


@dataclass(frozen=True)
class BudgetChunks:
    """As many tokens as are computed in `seconds`, at most `tokens`: long contexts get fewer."""

    seconds: float = 0.2
    tokens: int = 32_768

    def plan(self, queue: Iterable[Prompt], cost: Cost) -> Plan:
        """See Chunking."""
        room, spent = self.tokens, cost.alpha
        chosen: list[tuple[Prompt, int]] = []
        for prompt in queue:
            most = min(prompt.left, room)
            taken = cost.largest_q(prompt.done, self.seconds - spent + cost.alpha, most)
            if not taken:
                if chosen:
                    break
                taken = 1  # a budget below one token must not stop the rank
            chosen.append((prompt, taken))
            spent += cost.seconds(taken, prompt.done) - cost.alpha
            room -= taken
            if taken < prompt.left or not room:
                break
        return chosen, spent


class WholePrompts:
    """One prompt a step, all of it: an engine that is nothing but a queue."""

    def plan(self, queue: Iterable[Prompt], cost: Cost) -> Plan:
        """See Chunking."""
        first = next(iter(queue))
        return [(first, first.left)], cost.seconds(first.left, first.done)
