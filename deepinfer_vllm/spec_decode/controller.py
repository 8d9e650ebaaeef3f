"""What is drafted and what is verified, step by step: confidences and costs in, decisions out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.budget import allot, convex_floor, delayed, early_stop, filled, survival
from deepinfer_vllm.spec_decode.cost_table import CostTable
from deepinfer_vllm.spec_decode.expectation import Expectation
from deepinfer_vllm.spec_decode.outcomes import Outcomes

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Form = Literal["early-stop", "delayed", "fixed"]

PROBING = 0.0005
"""The part of all time that may be lost to steps that only look what another choice would cost; there are two kinds."""
DEAD_BAND = 0.001
"""Drafting stops where it loses more than this part of throughput, and begins where it gains more."""


class Calibrates(Protocol):
    """Turns confidences [R, S] into chances."""

    def apply(self, confidences: NDArray[np.floating]) -> NDArray[np.floating]: ...


class Chosen(Protocol):
    """How the budget is found: `early-stop` where confidences of the drafts at hand are known by then, `delayed` where
    only an earlier step's are, `fixed` to verify every draft and always draft."""

    @property
    def form(self) -> Form: ...


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

    A step: `plan` if drafts were made for it, then `wants_drafts` (which `plan` has asked already: `Plan.drafting`);
    later, in any step, `verified` and `observe_*`. Every decision about a draft follows from what was known before it
    was drawn (see `budget`), so outputs keep the target's distribution. One thread.
    """

    def __init__(self, calibration: Calibrates | None, costs: CostTable, settings: Chosen) -> None:
        """calibration: None to take confidences as they are."""
        self.costs = costs
        self.settings = settings
        self._calibration = calibration
        self._outcomes = Outcomes()
        self._expected = Expectation()
        self._drafting = True
        self._credit_s = {"verify": 0.0, "draft": 0.0}
        self.probes = {"verify": 0, "draft": 0}
        """Steps that were spent on looking."""

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
        requests = len(scheduled)
        limit = int(scheduled.sum()) if most is None else min(int(scheduled.sum()), most)
        verify = self.costs.verify_s(base_tokens, base_tokens + limit, context_tokens)
        if self.settings.form == "fixed":
            alive = survival(np.ones_like(confidences), scheduled)
            return Plan(allot(alive, limit), float(verify[limit]), True)
        alive = survival(self._chances(confidences), scheduled)
        seconds = verify + self.costs.draft_s(requests, context_tokens)
        if self.settings.form == "delayed":
            budget = delayed(alive, sampling, seconds)
        else:
            budget = filled(early_stop(alive, sampling, convex_floor(seconds)), seconds)
        self._expected.saw(alive, scheduled)
        budget = self._probed(budget, sampling, seconds)
        drafting = self.wants_drafts(requests, context_tokens)
        return Plan(allot(alive, budget), float(verify[budget]), drafting)

    def wants_drafts(self, requests: int, context_tokens: int) -> bool:
        """Whether the draft block is worth its time for a batch of so many, or nothing is known yet. Once a step."""
        if self.settings.form == "fixed" or not self._expected.known:
            return True
        without = self.costs.verify_s(requests, requests, context_tokens)[0]
        gain, loss_s = self._gain(requests, context_tokens, float(without))
        self._drafting = gain > (-DEAD_BAND if self._drafting else DEAD_BAND)
        if self._drafting:
            return True
        self._expected.aged()
        return self._affords("draft", float(without), loss_s)

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
        return self._outcomes.corrected(self._calibrated(confidences))

    def _gain(self, requests: int, context_tokens: int, without: float) -> tuple[float, float]:
        """Of drafting, relative to not drafting; and the seconds that a step of it loses."""
        drafts, tokens = self._expected.tokens(requests)
        verify = self.costs.verify_s(requests, requests + int(drafts[-1]), context_tokens)[drafts]
        seconds = verify + self.costs.draft_s(requests, context_tokens)
        best = int((tokens / seconds).argmax())
        gain = float(tokens[best] * without / (requests * seconds[best])) - 1.0
        return gain, max(0.0, float(seconds[best] - without * tokens[best] / requests))

    def _probed(self, budget: int, sampling: int, seconds: Floats) -> int:
        """Now and then the farther of no drafts and all: so the table's other end stays true too."""
        end = len(seconds) - 1
        other = 0 if 2 * budget > end else end
        if not self._drafting or not sampling or other == budget:
            return budget
        rate = sampling / float(seconds[0])
        loss_s = abs(float(seconds[other] - seconds[budget])) + (sampling / rate if other == 0 else 0.0)
        return other if self._affords("verify", float(seconds[budget]), loss_s) else budget

    def _affords(self, kind: str, step_s: float, loss_s: float) -> bool:
        """Whether time saved up pays for a look that loses so much; never more than one look is saved up."""
        saved = min(self._credit_s[kind] + PROBING * step_s, loss_s + step_s)
        affordable = saved >= max(loss_s, PROBING * step_s * 100)
        self._credit_s[kind] = saved - loss_s if affordable else saved
        self.probes[kind] += affordable
        return affordable
