"""What steps take, where the host waits for each of their parts anyway."""

import time
from collections.abc import Callable
from typing import Literal

from deepinfer_vllm.spec_decode.shared_times import SharedTimes, Time


class StepTimes:
    """Times the two parts of each step on the runner's thread, with three clock readings.

    A step's target part ends where its tokens are sampled. It begins where the step before ended if one request is in
    both, for what the engine does in between then belongs to the price of a step; else where the runner is called.
    """

    def __init__(self, shared: SharedTimes, clock: Callable[[], float] = time.perf_counter) -> None:
        self._shared, self._clock = shared, clock
        self._began = self._sampled = self._ended = 0.0
        self._before: frozenset[str] = frozenset()
        self._usual = True
        self.measured_s = 0.0
        """Of the latest step's target part; 0 if that was not a usual one."""

    def began(self, *, usual: bool) -> None:
        """The runner is called with a step, on every rank. `usual`: it does nothing but what its tokens ask for."""
        self._usual = usual
        self._began = self._clock()
        self._shared.begin_step()

    def sampled(self) -> None:
        """The target's tokens are there."""
        self._sampled = self._clock()

    def ended(
        self, requests: list[str], tokens: int, context_tokens: int, drafted_for: int, *, drafts: bool = True
    ) -> None:
        """The step of these requests is done; a block was drafted for so many requests of it, 0 for none. `drafts`:
        whether some were at hand."""
        now = self._clock()
        known = frozenset(requests)
        since = self._began if known.isdisjoint(self._before) else self._ended
        self._before, self._ended = known, now
        self.measured_s = self._sampled - since if self._usual else 0.0
        if self._usual:
            part: Literal["verify", "plain"] = "verify" if drafts or tokens > len(requests) else "plain"
            self._shared.tell(Time(part, tokens, context_tokens, self.measured_s))
        if drafted_for:
            self._shared.tell(Time("draft", drafted_for, context_tokens, now - self._sampled))
