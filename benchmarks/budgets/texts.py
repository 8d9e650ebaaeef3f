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

import numpy as np
from numpy.typing import NDArray

from budgets.curves import POSITIONS, Reading

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LOGITS: dict[Reading, tuple[float, float]] = {"drafts": (2.175, 2.4), "tokens": (2.737, 3.218)}
PERSISTENCE = 0.98
"""Correlation of a text's own part from place to place: some fifty tokens of alike difficulty."""


@dataclass
class MadeUp:
    """Texts of equal length, which start again at their end."""

    logits: Floats
    """[R, L]."""
    luck: Floats
    """[R, L]: a draft is accepted where its chance is more."""
    places: Ints
    """[R]: of the last token written."""

    @classmethod
    def of(cls, requests: int, length: int, seed: int, reading: Reading, harder: float = 0.0) -> MadeUp:
        """`harder`: taken from the logits of the middle third of each text."""
        random = np.random.default_rng(seed)
        middle, deviation = LOGITS[reading]
        own = random.standard_normal((requests, length))
        slow = random.standard_normal((requests, length))
        fresh = (1.0 - PERSISTENCE**2) ** 0.5
        for at in range(1, length):
            slow[:, at] = PERSISTENCE * slow[:, at - 1] + fresh * slow[:, at]
        logits = middle + deviation * (slow + own) / 2**0.5
        logits[:, length // 3 : 2 * length // 3] -= harder
        return cls(logits, random.random((requests, length)), np.zeros(requests, dtype=np.int64))

    def chances(self) -> Floats:
        """[R, 5]: of each draft at hand being accepted, if those before it are."""
        return _chance(np.take_along_axis(self.logits, self._ahead(), axis=1))

    def accepted(self, drafts: Ints) -> Ints:
        """[R]: how many of the verified ones [R] stand."""
        stands = np.take_along_axis(self.luck, self._ahead(), axis=1) < self.chances()
        stands &= np.arange(POSITIONS) < drafts[:, None]
        return np.cumprod(stands, axis=1).sum(axis=1)

    def advance(self, tokens: Ints) -> None:
        """[R]: tokens that each request has got."""
        self.places += tokens

    def _ahead(self) -> Ints:
        return (self.places[:, None] + np.arange(1, POSITIONS + 1)) % self.logits.shape[1]


def overconfident(chances: Floats) -> Floats:
    """What an uncalibrated head says of them: logits times 1.5, plus 0.4."""
    raised = np.exp(0.4) * chances**1.5
    return raised / (raised + (1.0 - chances) ** 1.5)


def _chance(logits: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-logits))
