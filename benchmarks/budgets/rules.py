"""Who decides what is verified: ours in both forms, vLLM's rule, all or nothing, and one that knows too much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from budgets.curves import POSITIONS, Curve, captured
from deepinfer_vllm.spec_decode.budget import allot, delayed, ranked, survival
from deepinfer_vllm.spec_decode.controller import Controller
from deepinfer_vllm.spec_decode.cost_table import CostTable
from deepinfer_vllm.spec_decode.forecast import Forecast
from deepinfer_vllm.spec_decode.settings import Form, Settings

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MEASURED = (*captured(), 768, 1024, 1536, 2048)
"""Sizes of batches whose cost is measured at start."""


@dataclass(frozen=True)
class Step:
    """What a rule may know, and what only the oracle looks at.

    `rows` [R]: which of all requests are in the batch; `confidences` [R, 5]: what the head says of the drafts at hand;
    `stale` [R, 5]: what it said one step earlier; `chances` [R, 5]: the truth; `have`: whether there are drafts;
    `context`: tokens of a request.
    """

    rows: Ints
    confidences: Floats
    stale: Floats
    chances: Floats
    have: bool
    context: float
    curve: Curve


class Rule(Protocol):
    """Called once a step."""

    def came(self, requests: int) -> None:
        """So many have come, in the place of all before."""

    def decide(self, step: Step) -> tuple[Ints, bool]:
        """Drafts to verify [R], and whether to draft for the next step."""

    def learn(self, step: Step, drafts: Ints, accepted: Ints, verify_s: float, draft_s: float) -> None:
        """What became of the drafts [R], and how long the step took; draft_s is 0 where nothing was drafted."""


class Deaf:
    """Learns nothing."""

    def came(self, requests: int) -> None:
        """Nothing."""

    def learn(self, step: Step, drafts: Ints, accepted: Ints, verify_s: float, draft_s: float) -> None:
        """Nothing."""


class Always(Deaf):
    """A fixed number of drafts for every request."""

    def __init__(self, drafts: int) -> None:
        self._drafts = drafts

    def decide(self, step: Step) -> tuple[Ints, bool]:
        """See Rule."""
        return np.full(len(step.chances), self._drafts if step.have else 0), self._drafts > 0


class Ours:
    """The controller that engines use, told what an engine tells it."""

    def __init__(self, form: Form, costs: CostTable) -> None:
        self._form = form
        self.controller = Controller(None, costs, Settings(form, calibration="off", record="", grammar=False))

    def came(self, requests: int) -> None:
        """See Rule."""
        for _ in range(requests):
            self.controller.came()

    def decide(self, step: Step) -> tuple[Ints, bool]:
        """See Rule."""
        requests = len(step.chances)
        context = int(requests * step.context)
        if not step.have:
            return np.zeros(requests, dtype=np.int64), self.controller.wants_drafts(requests, context)
        known = step.stale if self._form == "delayed" else step.confidences
        scheduled = np.full(requests, POSITIONS)
        plan = self.controller.plan(known, scheduled, requests, context, requests)
        if self._form == "delayed":
            return allot(survival(step.confidences, scheduled), plan.budget), plan.drafting
        return plan.drafts, plan.drafting

    def learn(self, step: Step, drafts: Ints, accepted: Ints, verify_s: float, draft_s: float) -> None:
        """See Rule."""
        requests = len(drafts)
        context = int(requests * step.context)
        if step.have:
            self.controller.observe_verify(requests + int(drafts.sum()), context, verify_s)
        else:
            self.controller.observe_plain(requests, context, verify_s)
        if draft_s:
            self.controller.observe_draft(requests, context, draft_s)
        if step.have:
            self.controller.verified(step.confidences, drafts, accepted)
            if self._form == "delayed" and not isinstance(self, Ahead):
                self.controller.drawn(self.controller.survivals(step.confidences))


class Ahead(Ours):
    """Ours where a step is launched before its drafts are drawn: by a forecast from those of the step before."""

    def __init__(self, costs: CostTable, requests: int) -> None:
        super().__init__("delayed", costs)
        self._forecast = Forecast(requests, POSITIONS)
        self._waiting: Step | None = None
        self._requests = requests

    def came(self, requests: int) -> None:
        """See Rule."""
        super().came(requests)
        self._waiting = None
        for slot in range(self._requests):
            self._forecast.forget(slot)

    def decide(self, step: Step) -> tuple[Ints, bool]:
        """See Rule."""
        requests = len(step.chances)
        context = int(requests * step.context)
        if self._waiting is not None:
            rows = self._waiting.rows
            self._forecast.saw(rows, self.controller.survivals(self._waiting.confidences))
            self.controller.drawn(self._forecast.of(rows))
        self._waiting = step if step.have else None
        if not step.have:
            self._forecast.aged()
            return np.zeros(requests, dtype=np.int64), self.controller.wants_drafts(requests, context)
        if not self._forecast.known:
            return np.full(requests, POSITIONS), True
        survivals = self._forecast.of(step.rows)
        plan = self.controller.plan_ahead(survivals, np.full(requests, POSITIONS), requests, context, requests)
        return plan.drafts, plan.drafting


class Upstream(Deaf):
    """vLLM 0.33's adaptive verification: the best budget by stale raw confidences and the costs measured at start,
    spent by current ones; it always drafts."""

    def __init__(self, costs: CostTable) -> None:
        self._costs = costs

    def decide(self, step: Step) -> tuple[Ints, bool]:
        """See Rule."""
        requests = len(step.chances)
        scheduled = np.full(requests, POSITIONS if step.have else 0)
        seconds = self._costs.verify_s(requests, requests + int(scheduled.sum()), 0) + self._costs.draft_s(requests, 0)
        budget = delayed(ranked(survival(step.stale, scheduled)), requests, seconds)
        return allot(survival(step.confidences, scheduled), budget), True


class Oracle(Deaf):
    """The best budget by the true chances of the drafts at hand and the true costs.

    No rule may do that, as the choice depends on what was drawn. It drafts where that has been faster.
    """

    def __init__(self) -> None:
        self._tokens, self._seconds = 0.0, 0.0

    def decide(self, step: Step) -> tuple[Ints, bool]:
        """See Rule."""
        requests = len(step.chances)
        scheduled = np.full(requests, POSITIONS if step.have else 0)
        alive = survival(step.chances, scheduled)
        sizes = requests + np.arange(int(scheduled.sum()) + 1)
        seconds = step.curve.verify_s(sizes, step.context) + step.curve.draft_s(requests)
        budget = delayed(ranked(alive), requests, seconds)
        drafts = allot(alive, budget)
        if step.have:
            self._tokens = 0.98 * self._tokens + requests + ranked(alive)[:budget].sum()
            self._seconds = 0.98 * self._seconds + float(seconds[budget])
        without = requests / float(step.curve.verify_s(requests, step.context))
        return drafts, not self._seconds or self._tokens / self._seconds > without


def measured(curve: Curve, contexts: tuple[float, ...], requests: int, random: np.random.Generator) -> CostTable:
    """A table as an engine measures it at start: five times each with 1 % of noise, at these contexts of a request."""

    def times(seconds: Floats | float) -> list[float]:
        return [float(seconds * np.exp(0.01 * random.standard_normal())) for _ in range(5)]

    verify = [
        (size, int(context * requests), seconds)
        for size in MEASURED
        for context in contexts
        for seconds in times(float(curve.verify_s(size, context)))
    ]
    draft = [
        (size, 0, seconds) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) for seconds in times(curve.draft_s(size))
    ]
    return CostTable.measured(verify, draft, max(curve.padded, default=0))
