"""What steps took, told to the cost table so that every rank's has the same."""

import time
from collections.abc import Callable
from typing import Any, Protocol

SHARED_EVERY = 16
"""Steps after which the ranks of a group take over what the first of them measured. A single rank does not wait."""
Observation = tuple[str, int, int, float]
"""What was timed, "verify" or "draft"; tokens or requests; context tokens of the batch; seconds."""


class Learns(Protocol):
    """Takes times of steps: a `Controller`."""

    def observe_verify(self, tokens: int, context_tokens: int, seconds: float) -> None: ...

    def observe_draft(self, requests: int, context_tokens: int, seconds: float) -> None: ...


class Ranks(Protocol):
    """Several processes that must decide alike: vLLM's tensor-parallel group."""

    world_size: int

    def broadcast_object(self, obj: Any, src: int = 0) -> Any: ...


class StepTimes:
    """Times the two parts of each step on the runner's thread, with three clock readings.

    A step's target part ends where its tokens are sampled. It begins where the step before ended if one request is in
    both, for what the engine does in between then belongs to the price of a step; else where the runner is called.
    """

    def __init__(
        self, learns: Learns, ranks: Ranks | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._learns, self._clock = learns, clock
        self._ranks = ranks if ranks is not None and ranks.world_size > 1 else None
        self._waiting: list[Observation] = []
        self._steps = 0
        self._began = self._sampled = self._ended = 0.0
        self._before: frozenset[str] = frozenset()
        self._usual = True
        self.measured_s = 0.0
        """Of the latest step's target part; 0 if that was not a usual one."""

    def began(self, *, usual: bool) -> None:
        """The runner is called with a step. `usual`: it does nothing but what its tokens ask for.

        A collective call, of every rank of the group and in the same steps."""
        self._usual = usual
        self._began = self._clock()
        self._steps += 1
        if self._ranks is not None and self._steps % SHARED_EVERY == 0:
            self._waiting = self._ranks.broadcast_object(self._waiting, src=0)
            self._flush()

    def sampled(self) -> None:
        """The target's tokens are there."""
        self._sampled = self._clock()

    def ended(self, requests: list[str], tokens: int, context_tokens: int, drafted_for: int) -> None:
        """The step of these requests is done; a block was drafted for so many requests of it, 0 for none."""
        now = self._clock()
        known = frozenset(requests)
        since = self._began if known.isdisjoint(self._before) else self._ended
        self._before, self._ended = known, now
        self.measured_s = self._sampled - since if self._usual else 0.0
        if self._usual:
            self._waiting.append(("verify", tokens, context_tokens, self.measured_s))
        if drafted_for:
            self._waiting.append(("draft", drafted_for, context_tokens, now - self._sampled))
        if self._ranks is None:
            self._flush()

    def _flush(self) -> None:
        for part, size, context_tokens, seconds in self._waiting:
            observe = self._learns.observe_verify if part == "verify" else self._learns.observe_draft
            observe(size, context_tokens, seconds)
        self._waiting = []
