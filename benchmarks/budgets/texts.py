"""Texts, made up, whose drafts are more or less likely to be accepted.

They have a difficulty at every place: the logit of a draft there being accepted, if those before it are, is
middle + a part of its text that changes slowly + a part of its own, both normal with the same variance. `LOGITS` holds
middle and standard deviation, solved from DeepSeek's two numbers: 3.29 tokens a step with all 5 drafts verified, and
3.20 with as many as its variable length verifies, the most likely survivors of 256 sequences; a test replays both. What
a rule verifies moves it on in the text, so a rule that stops before a hard place has the target write that place, as it
would be after a rejection.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from budgets.curves import POSITIONS, Reading

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LOGITS: dict[Reading, tuple[float, float]] = {"drafts": (2.175, 2.4), "tokens": (2.737, 3.218)}
PERSISTENCE = 0.98
"""Correlation of a text's own part from place to place: some fifty tokens of alike difficulty."""
MOST = 256
"""Requests that there are texts for."""


class Texts(Protocol):
    """What requests write. R: those of them at `rows`, which are in the batch."""

    rows: Ints
    """[R]: who is in the batch. Set it after `advance`, not in the middle of a step."""

    def confidences(self) -> Floats:
        """[R, 5]: what the head says of each draft at hand."""

    def accepted(self, drafts: Ints) -> Ints:
        """[R]: how many of the verified ones [R] stand."""

    def gained(self, drafts: Ints) -> float:
        """Drafts that stand of the verified ones [R], in all; as expected, where chances are known."""

    def advance(self, tokens: Ints) -> None:
        """[R]: tokens that each request has got."""


@dataclass
class MadeUp:
    """Texts of equal length, which start again at their end. The text of a request is the same however many there
    are."""

    logits: Floats
    """[N, L]."""
    luck: Floats
    """[N, L]: a draft is accepted where its chance is more."""
    rows: Ints
    places: Ints
    """[N]: of the last token written."""
    raw: bool = False
    """Whether confidences are `overconfident`."""
    _now: Floats | None = None
    """Chances of the drafts at hand, once they were asked for."""

    @classmethod
    def of(
        cls,
        requests: int,
        length: int,
        seed: int,
        reading: Reading,
        *,
        hard: float = 0.0,
        harder: float = 0.0,
        raw: bool = False,
    ) -> MadeUp:
        """`hard`: taken from all logits; `harder`: from those of the middle third of each text."""
        logits, luck = _drawn(length, seed, reading)
        logits, luck = logits[:requests], luck[:requests]
        if hard or harder:
            logits = logits - hard
            logits[:, length // 3 : 2 * length // 3] -= harder
        return cls(logits, luck, np.arange(requests), np.zeros(requests, dtype=np.int64), raw)

    def chances(self) -> Floats:
        """[R, 5]: of each draft at hand being accepted, if those before it are."""
        if self._now is None:
            self._now = 1.0 / (1.0 + np.exp(-self.logits[self.rows[:, None], self._ahead()]))
        return self._now

    def confidences(self) -> Floats:
        """See Texts."""
        return overconfident(self.chances()) if self.raw else self.chances()

    def accepted(self, drafts: Ints) -> Ints:
        """See Texts."""
        stands = self.luck[self.rows[:, None], self._ahead()] < self.chances()
        stands &= np.arange(POSITIONS) < drafts[:, None]
        return np.cumprod(stands, axis=1).sum(axis=1)

    def gained(self, drafts: Ints) -> float:
        """See Texts."""
        return float((np.cumprod(self.chances(), axis=1) * (np.arange(POSITIONS) < drafts[:, None])).sum())

    def advance(self, tokens: Ints) -> None:
        """See Texts."""
        self.places[self.rows] += tokens
        self._now = None

    def _ahead(self) -> Ints:
        return (self.places[self.rows, None] + np.arange(1, POSITIONS + 1)) % self.logits.shape[1]


def overconfident(chances: Floats) -> Floats:
    """What an uncalibrated head says of them: logits times 1.5, plus 0.4."""
    raised = np.exp(0.4) * chances**1.5
    return raised / (raised + (1.0 - chances) ** 1.5)


@lru_cache(maxsize=2)
def _drawn(length: int, seed: int, reading: Reading) -> tuple[Floats, Floats]:
    """Logits and luck [MOST, L]."""
    random = np.random.default_rng(seed)
    middle, deviation = LOGITS[reading]
    own, slow = random.standard_normal((MOST, length)), random.standard_normal((length, MOST))
    fresh = (1.0 - PERSISTENCE**2) ** 0.5
    for at in range(1, length):
        slow[at] = PERSISTENCE * slow[at - 1] + fresh * slow[at]
    return middle + deviation * (slow.T + own) / 2**0.5, random.random((MOST, length))
