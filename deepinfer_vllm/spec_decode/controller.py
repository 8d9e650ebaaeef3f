"""What is drafted and what is verified, step by step: confidences and costs in, decisions out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.budget import allot, convex_floor, delayed, early_stop, filled, ranked, survival
from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.cost_table import CostTable
from deepinfer_vllm.spec_decode.expectation import Expectation
from deepinfer_vllm.spec_decode.outcomes import Outcomes
from deepinfer_vllm.spec_decode.settings import Settings

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

PROBING = 0.0005
"""The part of all time that may be lost to steps that only look what the other choice, to draft or not, would bring."""
CHEAPEST = 0.01
"""The part of a step that a look is taken to lose at the least, so that there is not more than one in 20 steps."""
CREDIT = 2.0
"""Steps' time that may be owed for looks where costs have changed."""
LOOKS = 5
"""Looks in a row: as many as the cost table takes a median of."""
APART = 200
"""Steps at least between looks that are for new requests. One is enough, as confidences tell of many drafts at
once, and at a loss of a fifth of a step it is 0.1 % of time."""
DEAD_BAND = 0.001
"""Drafting stops where it loses more than this part of throughput, and begins where it gains more."""
PRICE = 0.9
"""Of what drafts cost, what they are taken to cost. Throughput is flat around the best budget; this takes the upper
end, as steps have costs that are not measured here and that more tokens a step save."""


@dataclass(frozen=True)
class Plan:
    """drafts: [R], to verify of each request; seconds: what the step is predicted to take; drafting: whether to draft
    for the next one."""

    drafts: Ints
    seconds: float
    drafting: bool

    @property
    def budget(self) -> int:
        """Drafts verified in all."""
        return int(self.drafts.sum())


class Controller:
    """The whole decision, without a clock, a device or vLLM: told the same, two of these decide the same.

    Each step asks once: `plan` if drafts were made for it, else `wants_drafts`; later, in any step, come `verified` and
    `observe_*`. Every decision about a draft follows from what was known before it was drawn (see `budget`), so outputs
    keep the target's distribution. One thread.
    """

    def __init__(self, calibration: Calibration | None, costs: CostTable, settings: Settings) -> None:
        """calibration: None to take confidences as they are."""
        self.costs = costs
        self.settings = settings
        self._calibration = calibration
        self._temperatures = None
        if calibration is not None and not calibration.is_identity:
            self._temperatures = np.array(calibration.temperatures)
        self._outcomes = Outcomes()
        self._expected = Expectation()
        self._drafting = True
        self._saved_s = 0.0
        self._looking = 0
        self._trying = False
        """Whether drafts at hand were made for a look."""
        self._surprises = 0
        self._came, self._without = 0, 0
        """Requests that have come, and steps, since drafting stopped or one looked for new requests."""
        self.looks = 0
        """Steps that did other than seemed best."""

    def came(self) -> None:
        """A request has come, whose text may be of another kind."""
        self._came += 1

    def plan(
        self,
        confidences: NDArray[np.floating],
        scheduled: Ints,
        base_tokens: int,
        context_tokens: int,
        sampling: int,
        most: int | None = None,
    ) -> Plan:
        """What to verify now.

        confidences: [R, S], of the drafts at hand or, in the form `delayed`, of an earlier step's (1 where there are
        none); scheduled: [R], drafts at hand; base_tokens: what the step computes without drafts; sampling: requests
        that sample in it; most: drafts that fit. In the form `delayed` only the plan's budget counts: which drafts it
        goes to is for current survivals to say, by `allot`.
        """
        limit = int(scheduled.sum()) if most is None else min(int(scheduled.sum()), most)
        if self.settings.form == "fixed":
            alive = survival(np.ones_like(confidences), scheduled)
            verify = self.costs.verify_s(base_tokens + limit, base_tokens + limit, context_tokens)
            return Plan(allot(alive, limit), float(verify[0]), True)
        alive = survival(self._chances(confidences), scheduled)
        best = ranked(alive)
        self._saw(alive, scheduled, best)
        if self.settings.form == "delayed" and self._expected.known:
            return self._planned(alive, best, self._expected.mixed(best), limit, base_tokens, context_tokens, sampling)
        return self._planned(alive, best, best, limit, base_tokens, context_tokens, sampling)

    def plan_ahead(
        self, survivals: Floats | None, scheduled: Ints, base_tokens: int, context_tokens: int, sampling: int
    ) -> Plan:
        """What to verify of drafts that are not drawn yet, by a forecast of their survivals [R, S], None where there is
        none: all of them. Else as `plan`, in the form `delayed`."""
        limit = int(scheduled.sum())
        if survivals is None or self.settings.form == "fixed":
            verify = self.costs.verify_s(base_tokens + limit, base_tokens + limit, context_tokens)
            return Plan(scheduled, float(verify[0]), True)
        alive = np.where(np.arange(survivals.shape[1]) < scheduled[:, None], survivals, 0.0)
        best = ranked(alive)
        whole = scheduled == alive.shape[1]
        if count := int(np.count_nonzero(whole)):
            self._expected.saw(best if count == len(whole) else ranked(alive[whole]), count)
        return self._planned(alive, best, best, limit, base_tokens, context_tokens, sampling)

    def survivals(self, confidences: NDArray[np.floating]) -> Floats:
        """[R, S] of whole blocks that were drawn with these confidences [R, S]: what `plan_ahead` is forecast from."""
        return survival(self._chances(confidences), np.full(len(confidences), confidences.shape[1]))

    def _planned(
        self,
        alive: Floats,
        best: Floats,
        expected: Floats,
        limit: int,
        base_tokens: int,
        context_tokens: int,
        sampling: int,
    ) -> Plan:
        """alive: [R, S]; best: the same, the highest first; expected: what the budget is chosen by."""
        requests = len(alive)
        verify = self.costs.verify_s(base_tokens, base_tokens + limit, context_tokens)
        draft_s = self.costs.draft_s(requests, context_tokens)
        seconds = verify + draft_s
        floor = convex_floor(seconds[0] + PRICE * (seconds - seconds[0]))
        if self.settings.form == "delayed":
            budget = delayed(expected, sampling, floor)
        else:
            budget = early_stop(expected, sampling, floor)
        budget = filled(budget, verify)
        if self._trying:  # else a table that is wrong about drafts would never hear of one
            budget = max(budget, min(requests, limit))
        drafting = self._worth(requests, context_tokens, draft_s)
        return Plan(allot(alive, budget, best), float(verify[budget]), drafting)

    def wants_drafts(self, requests: int, context_tokens: int) -> bool:
        """Whether the draft block is worth its time for a batch of so many, or nothing is known yet. Once a step, where
        `plan` was not asked."""
        return self._worth(requests, context_tokens, self.costs.draft_s(requests, context_tokens))

    def verified(self, confidences: NDArray[np.floating], drafts: Ints, accepted: Ints) -> None:
        """What became of drafts: their confidences [R, S] as `plan` gets them, how many were verified [R], and how many
        of these accepted [R]."""
        self._outcomes.saw(self._calibrated(confidences), drafts, accepted)

    def observe_verify(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """A target step took `seconds`."""
        self.costs.observe_verify(tokens, context_tokens, seconds)

    def observe_draft(self, requests: int, context_tokens: int, seconds: float) -> None:
        """A draft step took `seconds`."""
        self.costs.observe_draft(requests, context_tokens, seconds)

    def _calibrated(self, confidences: NDArray[np.floating]) -> NDArray[np.floating]:
        return confidences if self._calibration is None else self._calibration.apply(confidences)

    def _chances(self, confidences: NDArray[np.floating]) -> NDArray[np.floating]:
        return self._outcomes.corrected(confidences, self._temperatures)

    def _saw(self, alive: Floats, scheduled: Ints, best: Floats) -> None:
        whole = scheduled == alive.shape[1]
        if self.settings.form == "delayed":
            whole &= alive[:, -1] < 1.0  # else there was no earlier step
        if count := int(np.count_nonzero(whole)):
            self._expected.saw(best if count == len(whole) else ranked(alive[whole]), count)

    def _worth(self, requests: int, context_tokens: int, draft_s: float) -> bool:
        if self.settings.form == "fixed" or not requests or not self._expected.known:
            return True
        drafts, tokens = self._expected.tokens(requests)
        verify = self.costs.verify_at_s(requests + drafts, context_tokens)
        without, seconds = float(verify[0]), verify + draft_s
        gain = float((tokens / seconds).max()) * without / requests - 1.0
        self._drafting = gain > (-DEAD_BAND if self._drafting else DEAD_BAND)
        if self._drafting:
            self._trying, self._came, self._without = False, 0, 0
            return not self._looks(without, gain / (1.0 + gain))
        self._expected.aged()
        self._without += 1
        if self._came >= requests and self._without >= APART:
            self._expected.outdated()
            self._trying, self._came, self._without = True, 0, 0
            self.looks += 1
            return True
        one_each = int(np.searchsorted(drafts, requests))
        self._trying = self._looks(without, float((seconds / without - tokens / requests)[one_each:].min()))
        return self._trying

    def _looks(self, step_s: float, loss: float) -> bool:
        """Whether to do the other for this step, at a loss relative to `step_s`, out of time saved up for it; at once,
        on credit, where costs have changed and nothing is owed."""
        loss_s = step_s * max(loss, CHEAPEST)
        self._saved_s = min(self._saved_s + PROBING * step_s, LOOKS * loss_s)
        surprised = self.costs.surprises > self._surprises and 0.0 <= self._saved_s >= LOOKS * loss_s - CREDIT * step_s
        if not self._looking and (surprised or self._saved_s >= LOOKS * loss_s):
            self._looking = LOOKS
            self._surprises = self.costs.surprises
        if not self._looking:
            return False
        self._looking -= 1
        self._saved_s -= loss_s
        self.looks += 1
        return True
