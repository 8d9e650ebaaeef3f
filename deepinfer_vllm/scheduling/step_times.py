"""What steps took, seen from the scheduler: it is called before each of them and after."""

from collections import deque
from typing import Any, NamedTuple

from deepinfer_costmodel.step import Load


class Step(NamedTuple):
    """One that has been scheduled."""

    key: Any
    """Its `SchedulerOutput`."""
    load: Load
    predicted_s: float
    began_s: float
    """When the scheduler was called for it."""


class StepTimes:
    """Pairs the ends of steps with their beginnings; one thread, as the engine's.

    With running requests the next step follows at once, so a step lasts from the end of the one before: what the engine
    does in between belongs to the time between two tokens, and with steps in flight the device begins one where it ends
    the other. After an idle time a step lasts from where the scheduler was called.
    """

    def __init__(self) -> None:
        self._flying: deque[Step] = deque()
        self._ended_s = 0.0
        self._busy = False

    def scheduled(self, step: Step) -> None:
        """A step is on its way; one without tokens says that the engine waits."""
        self._flying.append(step)
        if not step.load.chunks and not step.load.decodes:
            self._busy = False

    def ended(self, key: Any, now_s: float) -> tuple[Step, float] | None:
        """The step of `key` ended: it, and its seconds. None for one that nobody scheduled."""
        while self._flying:
            step = self._flying.popleft()
            if step.key is key:
                follows = self._busy or step.began_s < self._ended_s
                began_s = self._ended_s if follows else step.began_s
                self._ended_s = now_s
                return step, now_s - began_s
        return None

    def goes_on(self, running: bool) -> None:
        """After the end of a step: whether requests are left to run in a next one."""
        self._busy = running
