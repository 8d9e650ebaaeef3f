"""What steps cost in the simulation, derived from what DeepSeek said of its own service.

DeepSeek's statements on variable-length verification of 5 drafts, next to verifying all 5: 30 % fewer verified tokens,
accepted length 3.29 to 3.20, and throughput -1.5 % at 16 sequences a rank, +4 to 7 % at about 60, +11 % at 96. With a
step's time being V(tokens) for the target and D for the drafts, each is a ratio,

    3.20 / 3.29 * (V(6n) + D(n)) / (V(k n) + D(n)) = 1 + gain(n),

and three of them leave no freedom to a curve of two unknowns: the generalised roofline, flat while weights are read and
linear once arithmetic fills the time,

    V(t) = (1 + (t / knee) ** bend) ** (1 / bend).

`fitted` finds knee and bend; all three statements are met within 0.1 % for the middle of "4 to 7". `Reading` says what
"30 % fewer verified tokens" counts: drafts (5 to 3.5) or all tokens of the step (6 to 4.2). Both are simulated. D is 3
layers of 40 over 5 tokens a sequence: 0.075 V(5n), more than it is, as draft layers have fewer experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Reading = Literal["drafts", "tokens"]

ACCEPTED_FIXED, ACCEPTED_VARIABLE, FEWER = 3.29, 3.20, 0.30
GAINS = {16: -0.015, 60: 0.055, 96: 0.11}
DRAFT_SHARE = 3 / 40
POSITIONS = 5
FLAT_S = 0.02
"""Seconds of a step at no load: 50 tokens a second for each user. Only its ratio to context's time matters."""
PAIR_S = 8 * 2 * 32 * 128 / 1e15
"""Seconds for a query to score one token of context: 8 index layers of 32 heads of 128, at 1e15 operations a second."""


def verified_tokens(reading: Reading) -> float:
    """Tokens a sequence and step that DeepSeek's variable length verifies."""
    kept = 1.0 - FEWER
    return 1.0 + kept * POSITIONS if reading == "drafts" else kept * (1.0 + POSITIONS)


def roofline(tokens: Floats | float, knee: float, bend: float) -> Floats | float:
    """V, 1 at no load."""
    return (1.0 + (np.asarray(tokens) / knee) ** bend) ** (1.0 / bend)


def stated(knee: float, bend: float, reading: Reading) -> dict[int, float]:
    """The gains that a curve implies, by sequences a rank."""

    def step(sequences: int, tokens: float) -> float:
        drafting = DRAFT_SHARE * roofline(POSITIONS * sequences, knee, bend)
        return float(roofline(tokens * sequences, knee, bend) + drafting)

    ratio = ACCEPTED_VARIABLE / ACCEPTED_FIXED
    return {n: ratio * step(n, 1.0 + POSITIONS) / step(n, verified_tokens(reading)) - 1.0 for n in GAINS}


@cache
def fitted(reading: Reading, middle: float = GAINS[60]) -> tuple[float, float]:
    """Knee and bend that meet the statements best, by the largest miss; `middle`: the gain at 60 sequences."""
    gains = {**GAINS, 60: middle}

    def miss(knee: float, bend: float) -> float:
        return max(abs(found - gains[n]) for n, found in stated(knee, bend, reading).items())

    centre, spread = (550.0, 1.8), (350.0, 0.8)
    for _ in range(6):
        grid = [
            (miss(knee, bend), knee, bend)
            for knee in np.linspace(centre[0] - spread[0], centre[0] + spread[0], 21)
            for bend in np.linspace(centre[1] - spread[1], centre[1] + spread[1], 21)
        ]
        _, *best = min(grid)
        centre, spread = (best[0], best[1]), (spread[0] / 4, spread[1] / 4)
    return float(centre[0]), float(centre[1])


@dataclass(frozen=True)
class Curve:
    """Seconds of steps. `padded`: sizes that batches are padded to, rising; a batch beyond them is not."""

    knee: float
    bend: float
    padded: tuple[int, ...] = ()
    pair_s: float = PAIR_S
    scale: float = 1.0
    """All times are multiplied by it."""
    experts: float = 0.0
    """Part of the flat time that grows with the experts a batch touches: 6 of 384 a token, drawn evenly."""

    def verify_s(self, tokens: Floats | int, context: float) -> Floats:
        """Of target steps over `tokens`, each attending `context` tokens."""
        sizes = np.asarray(tokens, dtype=np.float64)
        if self.padded:
            at = np.searchsorted(self.padded, sizes)
            sizes = np.where(at < len(self.padded), np.append(self.padded, 0)[at], sizes)
        idle = self.experts * (1.0 - 6 / 384) ** sizes
        flat = roofline(sizes, self.knee, self.bend) - idle
        return self.scale * (FLAT_S * flat + self.pair_s * sizes * context)

    def draft_s(self, requests: int) -> float:
        """Of drafting a block for each."""
        return float(self.scale * FLAT_S * DRAFT_SHARE * roofline(POSITIONS * requests, self.knee, self.bend))


def captured(most: int = 512) -> tuple[int, ...]:
    """The sizes for which vLLM captures graphs by default."""
    return (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16))
