"""What steps take on a device, by moments of its own queue."""

from typing import Literal

from deepinfer_vllm.spec_decode.ledger import Step
from deepinfer_vllm.spec_decode.shared_times import SharedTimes, Time


class DeviceTimes:
    """The two parts of each step, as `StepTimes` has them, told once the step is done.

    A step's target part begins where the step before ended, if one request is in both: the time in which the device has
    nothing to do then belongs to the price of a step.
    """

    def __init__(self, shared: SharedTimes) -> None:
        self._shared = shared
        self._before: Step | None = None
        self.measured_s = 0.0
        """Of the latest step's target part; 0 if that was not a usual one."""

    def begin_step(self) -> None:
        """The runner is called with a step, on every rank."""
        self._shared.begin_step()

    def arrived(self, step: Step) -> None:
        """A step is done; they come in order."""
        before, self._before = self._before, step
        since = step.began
        if before is not None and not frozenset(before.ids).isdisjoint(step.ids):
            since = before.arrival.moment
        self.measured_s = since.elapsed_time(step.sampled) / 1000.0 if step.usual else 0.0
        if step.usual:
            plain = not step.predicted_s and step.tokens == len(step.ids)
            part: Literal["verify", "plain"] = "plain" if plain else "verify"
            self._shared.tell(Time(part, step.tokens, step.context_tokens, self.measured_s))
        if step.drafted:
            draft_s = step.sampled.elapsed_time(step.arrival.moment) / 1000.0
            self._shared.tell(Time("draft", len(step.ids), step.context_tokens, draft_s))
