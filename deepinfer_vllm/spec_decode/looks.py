"""When a step does other than seems best, to draft or not, so that what seems best is known to be."""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto

PROBING = 0.0005
"""The part of all time that may be lost to looks at what steps of the other choice take."""
CHEAPEST = 0.01
"""The part of a step that a look is taken to lose at the least, so that there is not more than one in 20 steps."""
CREDIT = 2.0
"""Steps' time that may be owed for looks where costs have changed."""
LOOKS = 5
"""Looks in a row: as many as the cost table takes a median of."""
EARLY, SOON = 16, 7
"""Steps of one choice with about as many requests, after which as many looks at the other follow that nobody saves up
for, once: what was measured at the start knows nothing of sampling, grammars and the engine. Some more than a median
takes, as requests come and go."""
READING = 0.0005
"""The part of all time that may be lost to drafts that are only read: their confidences say what texts are like."""
ARRIVED = 2.0
"""How many times as much where as many requests have come since as there are."""


class Look(Enum):
    """What a step does of which drafts are thought not to be worth it."""

    NONE = auto()
    READ = auto()
    """Draft, and verify what is worth it, if anything is."""
    VERIFY = auto()
    """Draft, and verify some whatever they are worth: else a table that is wrong about drafts would never hear of
    one."""


class Looks:
    """Pays looks out of time that is saved up for them. What it says follows from what it is told. One thread."""

    def __init__(self) -> None:
        self._saved_s = self._for_reading_s = 0.0
        self._drafting, self._left, self._paid = True, 0, False
        self._surprises = 0
        self._came = 0
        self._steps: Counter[tuple[bool, int]] = Counter()
        """Of each choice, by the power of two of requests."""
        self.count = 0
        """Steps that did other than seemed best."""

    def came(self) -> None:
        """A request has come, whose text may be of another kind."""
        self._came += 1

    def without_drafts(self, requests: int, step_s: float, loss: float, surprises: int) -> bool:
        """Whether to leave the drafts out where they are worth it.

        step_s: of a step without drafts; loss: the part of one that is lost by it; surprises: how often costs were
        found to have changed.
        """
        self._came, self._for_reading_s = 0, 0.0
        return self._looks(True, requests, step_s, loss, surprises)

    def with_drafts(self, requests: int, step_s: float, loss: float, draft_s: float, surprises: int) -> Look:
        """Whether to draft where that is not worth it. draft_s: of a block; else as `without_drafts`."""
        if self._looks(False, requests, step_s, loss, surprises):
            self._came, self._for_reading_s = 0, 0.0
            return Look.VERIFY
        cost_s = max(draft_s, CHEAPEST * step_s)
        self._for_reading_s = min(self._for_reading_s + READING * step_s, cost_s)
        if self._for_reading_s * (ARRIVED if self._came >= requests else 1.0) < cost_s:
            return Look.NONE
        self._came, self._for_reading_s = 0, 0.0
        self.count += 1
        return Look.READ

    def _looks(self, drafting: bool, requests: int, step_s: float, loss: float, surprises: int) -> bool:
        if drafting != self._drafting:
            self._drafting, self._left = drafting, 0
        loss_s = step_s * max(loss, CHEAPEST)
        self._saved_s = min(self._saved_s + PROBING * step_s, LOOKS * loss_s)
        if not self._left:
            kind = drafting, requests.bit_length()
            self._steps[kind] += 1
            owing = 0.0 <= self._saved_s >= LOOKS * loss_s - CREDIT * step_s
            if self._steps[kind] == EARLY:
                self._left, self._paid = SOON, False
            elif self._saved_s >= LOOKS * loss_s or (surprises > self._surprises and owing):
                self._left, self._paid, self._surprises = LOOKS, True, surprises
        if not self._left:
            return False
        self._left -= 1
        self._saved_s -= loss_s * self._paid
        self.count += 1
        return True
