"""What it costs to verify and to draft, by batch and by context."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_vllm.spec_decode.cost_surface import CostSurface, Sample, usable
from deepinfer_vllm.spec_decode.plain_steps import PlainSteps

DEARER = 1.02
"""How many times as dear steps without drafts may seem as those with, of as many tokens: beyond, the latter are
learnt from them, as drafts take no time away."""


class CostTable:
    """Seconds of a target step over so many tokens, and of a draft step for so many requests.

    Steps of the target are those with drafts at hand, verified or not; `plain_s` is of those without.
    `context_tokens` is everywhere the sum over the batch. Lookups take some ten microseconds, observations as well, and
    memory is bounded. All seconds follow from what was given in the order it was given: tables that are told the same
    answer the same. One thread.
    """

    def __init__(self, verify: CostSurface, draft: CostSurface) -> None:
        self._verify, self._draft = verify, draft
        self._plain = PlainSteps()
        self._errors: deque[float] = deque(maxlen=65)

    @classmethod
    def measured(cls, verify: Iterable[Sample], draft: Iterable[Sample], padded_to: int = 0) -> CostTable:
        """From times at start. verify: (tokens, context tokens, seconds) of target steps; draft: (requests, context
        tokens, seconds). Up to `padded_to` tokens, the largest captured graph, a batch is padded to the next size that
        was measured; beyond, and with 0 everywhere, cost is linear between sizes. ValueError where nothing was.
        """
        return cls(CostSurface.measured(verify, padded_to), CostSurface.measured(draft))

    @property
    def error(self) -> float | None:
        """Median of |predicted - observed| / observed of the last 65 target steps, predicted before each was learnt."""
        return median(self._errors) if self._errors else None

    @property
    def surprises(self) -> int:
        """How often live times of target steps were so far off that costs must have changed."""
        return self._verify.surprises + self._plain.surprises

    def verify_s(self, first_tokens: int, last_tokens: int, context_tokens: int) -> NDArray[np.float64]:
        """[last - first + 1] seconds of a target step over first, first + 1, ... last tokens; never falling."""
        return self._verify.between(first_tokens, last_tokens, context_tokens)

    def verify_at_s(self, tokens: NDArray[np.int64], context_tokens: int) -> NDArray[np.float64]:
        """[n] seconds of target steps over tokens [n], rising."""
        return self._verify.at(tokens, context_tokens)

    def plain_s(self, requests: int, context_tokens: int) -> float:
        """Seconds of a target step in which each of so many requests has its one token, and no drafts."""
        if not self._plain.known:
            return self._verify.one(requests, context_tokens)
        return self._verify.at_start(requests, context_tokens) * self._plain.factor(requests)

    def draft_s(self, requests: int, context_tokens: int) -> float:
        """Seconds to draft a block for each of so many requests."""
        return self._draft.one(requests, context_tokens)

    def observe_verify(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """A target step took `seconds`. What cannot be is ignored; what is far off moves little."""
        if usable(tokens, context_tokens, seconds):
            expected = self._verify.one(tokens, context_tokens)
            self._errors.append(abs(expected - seconds) / seconds)
        self._verify.observe(tokens, context_tokens, seconds)

    def observe_plain(self, requests: int, context_tokens: int, seconds: float) -> None:
        """A target step as `plain_s` has it took `seconds`."""
        if usable(requests, context_tokens, seconds):
            self._errors.append(abs(self.plain_s(requests, context_tokens) - seconds) / seconds)
            self._plain.observe(requests, seconds / self._verify.at_start(requests, context_tokens))
            at_hand_s = self._verify.one(requests, context_tokens)
            if self._plain.known and self.plain_s(requests, context_tokens) > DEARER * at_hand_s:
                self._verify.observe(requests, context_tokens, seconds)

    def observe_draft(self, requests: int, context_tokens: int, seconds: float) -> None:
        """A draft step took `seconds`."""
        self._draft.observe(requests, context_tokens, seconds)

    def to_json(self) -> dict[str, Any]:
        """For a file or another rank."""
        return {"verify": self._verify.to_json(), "draft": self._draft.to_json()}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> CostTable:
        """What `to_json` gave. ValueError if it is something else."""
        try:
            return cls(CostSurface.from_json(found["verify"]), CostSurface.from_json(found["draft"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a cost table: {type(error).__name__} {error}") from error
