"""What drafting did in the steps of one worker, counted as it happens and handed over step by step."""

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.report_metrics import Report

RECENT = 1024
"""Verifications that the accepted length is a mean of, older ones counting less and less."""


class DraftStats:
    """Counts of one worker's runner thread. What a step tells costs a few microseconds; memory does not grow.

    `gauges` holds what is as it is: set `calibrated`, `calibration_error` and `cost_error` there when they change.
    """

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._recent_tokens = self._recent_verifications = 0.0
        self.gauges: dict[str, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._counts: dict[str, int] = {}
        self._values: dict[str, list[float]] = {}
        self._ends: dict[str, NDArray[np.int64]] = {}

    def _count(self, name: str, number: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + number

    def _observe(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(value)

    def _count_ends(self, name: str, ends: NDArray[np.integer]) -> None:
        counts = np.bincount(ends, minlength=self._positions + 1)
        self._ends[name] = self._ends[name] + counts if name in self._ends else counts

    def drafted(self, requests: int) -> None:
        """A draft block ran for that many requests."""
        self.gauges["drafting"] = 1.0
        self._count("draft_steps", 1)
        self._count("drafted_tokens", requests * self._positions)

    def masked(self, tokens: int, unmasked_requests: int) -> None:
        """So many tokens were drawn under a grammar, and so many more requests have one that drafts do not keep to."""
        if tokens or unmasked_requests:
            self._count("masked_tokens", tokens)
            self._count("unmasked_requests", unmasked_requests)

    def withheld(self) -> None:
        """A step that could have drafted did not, because it would not have paid."""
        self.gauges["drafting"] = 0.0
        self._count("withheld_steps", 1)

    def verified(self, verified: NDArray[np.integer], accepted: NDArray[np.integer]) -> None:
        """What the target said: of each request [R] that had a token sampled, drafts checked and drafts that stood."""
        if not len(verified):
            return
        requests, stood, checked = len(verified), int(accepted.sum()), int(verified.sum())
        self._count("verifications", requests)
        self._observe("budget_tokens", checked)
        if checked:
            self._count_ends("verified_tokens", verified)
            self._count_ends("accepted_tokens", accepted)
        kept = max(0.0, 1 - requests / RECENT)
        self._recent_tokens = kept * self._recent_tokens + stood + requests
        self._recent_verifications = kept * self._recent_verifications + requests
        self.gauges["accepted_length"] = self._recent_tokens / self._recent_verifications

    def stepped(
        self,
        samples: NDArray[np.bool_],
        drafts: NDArray[np.integer],
        accepted: NDArray[np.integer],
        *,
        drafted: bool,
    ) -> None:
        """A step of R requests: who of them had a token sampled [R], drafts that were checked of each and drafts that
        stood [R], and whether a block was drafted for them."""
        self.verified(drafts[samples], accepted[samples])
        if drafted:
            self.drafted(len(samples))
        elif samples.any():
            self.withheld()

    def timed(self, predicted_seconds: float, measured_seconds: float) -> None:
        """What the cost tables said of a step before it ran, and what it took."""
        self._observe("predicted_step_seconds", predicted_seconds)
        self._observe("measured_step_seconds", measured_seconds)

    def take(self) -> Report:
        """What has been counted since the last call, and the gauges as they are; empty if nothing was."""
        if not self._counts and not self._values:
            return {}
        # A request whose first k drafts were checked adds one at each of the positions 0..k-1.
        by_position = {name: ends[::-1].cumsum()[-2::-1].tolist() for name, ends in self._ends.items()}
        report: Report = {
            "counters": {**self._counts, **by_position},
            "gauges": dict(self.gauges),
            "histograms": self._values,
        }
        self._clear()
        return report
