"""Texts of a real engine: what the trained pair's head said of its drafts at every place, and how many of them stood.

`python benchmarks/dspark_budget.py --record` makes them: a CPU engine answers held-out prompts greedily, drafts in
every step and verifies nothing, so that there is a block at each place of the answer; of a greedy block as many drafts
stand as agree with what the answer goes on with. So a replay may stop anywhere and goes on with what an engine would
have said there. Confidences are kept to 1/255, of which each head is surer than it is right.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgets.curves import POSITIONS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FILE = Path(__file__).with_name("recorded.npz")
STEPS_OF_CONFIDENCE = 255


@dataclass
class Recorded:
    """Some of the texts, one for each request, which start again at their end: `Texts`."""

    said: Floats
    """[N, L, 5]: confidences of the block at each place."""
    stood: Ints
    """[N, L]: how many of it stand."""
    texts: Ints
    """Of each request."""
    places: Ints
    """Of the block at hand, of each request."""
    rows: Ints

    @classmethod
    def of(cls, requests: int, seed: int, path: Path = FILE) -> Recorded:
        """Texts in an order of the seed, from any place on; of more requests than texts, some share one."""
        said, stood = _read(path)
        random = np.random.default_rng([seed, requests])
        texts = random.permutation(max(requests, len(stood)))[:requests] % len(stood)
        return cls(said, stood, texts, random.integers(0, stood.shape[1], requests), np.arange(requests))

    def confidences(self) -> Floats:
        """See Texts."""
        return self.said[self._at()]

    def accepted(self, drafts: Ints) -> Ints:
        """See Texts."""
        return np.minimum(self.stood[self._at()], drafts)

    def gained(self, drafts: Ints) -> float:
        """See Texts."""
        return float(self.accepted(drafts).sum())

    def advance(self, tokens: Ints) -> None:
        """See Texts."""
        self.places[self.rows] += tokens

    def _at(self) -> tuple[Ints, Ints]:
        return self.texts[self.rows], self.places[self.rows] % self.stood.shape[1]


@cache
def _read(path: Path) -> tuple[Floats, Ints]:
    with np.load(path) as found:
        return found["said"] / STEPS_OF_CONFIDENCE, found["stood"].astype(np.int64)


def origin(path: Path = FILE) -> dict[str, Any]:
    """Command, commit, day and machine that they are of."""
    with np.load(path) as found:
        made: dict[str, Any] = json.loads(str(found["facts"]))
    return made


def write(path: Path, blocks: list[tuple[Floats, Ints]], made: dict[str, Any]) -> None:
    """blocks: of each text, confidences [L, 5] and how many stood [L]; as long as the shortest are kept."""
    length = min(len(stood) for _, stood in blocks)
    said = np.stack([np.rint(said[:length] * STEPS_OF_CONFIDENCE) for said, _ in blocks])
    stood = np.stack([stood[:length] for _, stood in blocks])
    assert said.shape == (*stood.shape, POSITIONS)
    np.savez_compressed(
        path, said=said.astype(np.uint8), stood=stood.astype(np.uint8), facts=np.array(json.dumps(made))
    )


def standing(blocks: list[list[int]], answer: list[int]) -> list[int]:
    """Of the block drafted behind each token of a greedy answer, how many tokens the answer goes on with.

    blocks: of each place that is known, the tokens drafted there; the first block follows the first token. Places are
    left out of which the answer ends too early to tell.
    """
    found = []
    for place, block in enumerate(blocks[: max(0, len(answer) - POSITIONS)]):
        follows = answer[place + 1 : place + 1 + len(block)]
        agrees = [drafted == token for drafted, token in zip(block, follows, strict=True)]
        found.append(agrees.index(False) if False in agrees else len(block))
    return found
