"""What is drafted and what is verified, step by step: confidences and costs in, decisions out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.budget import Chances, allot, ranked, survival
from deepinfer_vllm.spec_decode.calibration import Calibration
from deepinfer_vllm.spec_decode.cost_table import CostTable
from deepinfer_vllm.spec_decode.decision import Ranked, by_chances, by_survivals, decided
from deepinfer_vllm.spec_decode.expectation import Expectation
from deepinfer_vllm.spec_decode.looks import Look, Looks
from deepinfer_vllm.spec_decode.outcomes import Outcomes
from deepinfer_vllm.spec_decode.settings import Settings

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

DEAD_BAND = 0.001
"""Drafting stops where it loses more than this part of throughput, and begins where it gains more."""


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
        self._looks = Looks()
        self._drafting = True
        self._trying = False
        """Whether drafts at hand were made to see what it takes to verify some."""

    @property
    def looks(self) -> int:
        """Steps that did other than seemed best."""
        return self._looks.count

    def came(self) -> None:
        """A request has come, whose text may be of another kind."""
        self._looks.came()

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
        drafts, expected = by_chances(self._chances(confidences), scheduled), None
        whole = scheduled == drafts.alive.shape[1]
        if self.settings.form == "delayed":
            whole &= drafts.alive[:, -1] < 1.0  # else there was no earlier step
        self._saw(drafts, whole)
        if self.settings.form == "delayed" and self._expected.known:
            expected = self._expected.mixed(drafts.best)
        return self._planned(drafts, expected, limit, base_tokens, context_tokens, sampling)

    def plan_ahead(
        self, survivals: Floats | None, scheduled: Ints, base_tokens: int, context_tokens: int, sampling: int
    ) -> Plan:
        """What to verify of drafts that are not drawn yet, by a forecast of their survivals [R, S], None where there is
        none: all of them. Else as `plan`, in the form `delayed`."""
        limit = int(scheduled.sum())
        if survivals is None or self.settings.form == "fixed":
            verify = self.costs.verify_s(base_tokens + limit, base_tokens + limit, context_tokens)
            return Plan(scheduled, float(verify[0]), True)
        drafts = by_survivals(survivals, scheduled)
        if self._drafting:  # else the forecast is an old one, and `drawn` will tell of the block itself
            self._saw(drafts, scheduled == survivals.shape[1])
        return self._planned(drafts, None, limit, base_tokens, context_tokens, sampling)

    def survivals(self, confidences: NDArray[np.floating]) -> Chances:
        """[R, S] of whole blocks that were drawn with these confidences [R, S]: what `plan_ahead` is forecast from."""
        return survival(self._chances(confidences), np.full(len(confidences), confidences.shape[1]))

    def drawn(self, survivals: Floats) -> None:
        """Survivals [R, S] to expect after whole blocks that were drawn: for whoever asks `plan_ahead`, and may have
        stopped to by the time that they are known."""
        if not self._drafting and len(survivals):
            self._expected.saw(ranked(survivals), len(survivals))

    def _planned(
        self,
        drafts: Ranked,
        expected: Floats | None,
        limit: int,
        base_tokens: int,
        context_tokens: int,
        sampling: int,
    ) -> Plan:
        """expected: what the budget is chosen by, None for `drafts`."""
        requests = len(drafts.alive)
        verify = self.costs.verify_s(base_tokens, base_tokens + limit, context_tokens)
        draft_s = self.costs.draft_s(requests, context_tokens)
        # Else a table that is wrong about drafts would never hear of one.
        least = min(requests, limit) if self._trying else 0
        early = self.settings.form == "early-stop"
        budget, verified = decided(drafts, expected, verify, draft_s, sampling, early=early, least=least)
        return Plan(verified, float(verify[budget]), self._worth(requests, context_tokens, draft_s))

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

    def observe_plain(self, requests: int, context_tokens: int, seconds: float) -> None:
        """A target step of so many requests, each with one token and none with drafts at hand, took `seconds`."""
        self.costs.observe_plain(requests, context_tokens, seconds)

    def observe_draft(self, requests: int, context_tokens: int, seconds: float) -> None:
        """A draft step took `seconds`."""
        self.costs.observe_draft(requests, context_tokens, seconds)

    def _calibrated(self, confidences: NDArray[np.floating]) -> NDArray[np.floating]:
        return confidences if self._calibration is None else self._calibration.apply(confidences)

    def _chances(self, confidences: NDArray[np.floating]) -> NDArray[np.floating]:
        return self._outcomes.corrected(confidences, self._temperatures)

    def _saw(self, drafts: Ranked, whole: NDArray[np.bool_]) -> None:
        """whole: [R], which requests have all their drafts."""
        if count := int(np.count_nonzero(whole)):
            self._expected.saw(drafts.best if count == len(whole) else ranked(drafts.alive[whole]), count)

    def _worth(self, requests: int, context_tokens: int, draft_s: float) -> bool:
        if self.settings.form == "fixed" or not requests or not self._expected.known:
            return True
        drafts, tokens = self._expected.tokens(requests)
        verify = self.costs.verify_at_s(requests + drafts, context_tokens)
        without, seconds = self.costs.plain_s(requests, context_tokens), verify + draft_s
        gain = float((tokens / seconds).max()) * without / requests - 1.0
        self._drafting = gain > (-DEAD_BAND if self._drafting else DEAD_BAND)
        surprises = self.costs.surprises
        if self._drafting:
            self._trying = False
            return not self._looks.without_drafts(requests, without, gain / (1.0 + gain), surprises)
        self._expected.aged()
        one_each = int(np.searchsorted(drafts, requests))
        loss = float((seconds / without - tokens / requests)[one_each:].min())
        look = self._looks.with_drafts(requests, without, loss, draft_s, surprises)
        self._trying = look is Look.VERIFY
        if look is Look.READ:
            self._expected.outdated()
        return look is not Look.NONE
