"""Runs a rule over texts and curves, and adds up what it wrote in how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from budgets.curves import POSITIONS, Curve, Reading, fitted
from budgets.recorded import Recorded
from budgets.rules import Ahead, Always, Oracle, Ours, Rule, Step, Upstream, measured
from budgets.texts import MadeUp, Texts

NOISE, STALLS, STALL = 0.03, 0.01, 30.0
"""Of times that an engine observes: their deviation, how many are stalls, and how many times longer these last."""
WARM = 0.25
"""Part of the steps that is not counted: what is lost while learning is reported apart."""
LONGEST = 4000
"""Places of a text."""

RULES: dict[str, Callable[[Scene, np.random.Generator], Rule]] = {}


@dataclass(frozen=True)
class Scene:
    """A replay."""

    requests: int
    rule: str = "none"
    reading: Reading = "drafts"
    curve: Curve = field(default_factory=lambda: Curve(*fitted("drafts")))
    later: Curve | None = None
    """What the curve becomes after a third of the steps."""
    context: float = 0.0
    measured_at: tuple[float, ...] = (0.0,)
    raw: bool = False
    """Confidences are overconfident, and no calibration is loaded."""
    hard: float = 0.0
    harder: float = 0.0
    """See MadeUp."""
    places: int = 0
    """Of a text; 0 for what the steps may take, up to `LONGEST`."""
    recorded: bool = False
    """Texts are those of an engine: `Recorded`. An oracle would be the hindsight."""
    answers: tuple[int, int] | None = None
    """Fewest and most tokens of an answer, where batches are closed: requests come together, and the next ones when
    the last of them has its answer. None: as many requests at any time."""
    unmeasured: float = 0.0
    """Part by which a step with drafts at hand takes longer than the start's measurement knew of."""
    steps: int = 600
    seed: int = 1


@dataclass(frozen=True)
class Result:
    """What a rule came to, after `WARM`."""

    throughput: float
    """Tokens a second of all requests, from expected tokens and true times."""
    whole: float
    """Throughput of all steps."""
    accepted_length: float
    verified: float
    """Drafts a request and step."""
    drafted: float
    """Part of the steps that drafted."""


class Batches:
    """Who is in the batch, step by step."""

    def __init__(self, scene: Scene) -> None:
        self._answers, self._random = scene.answers, np.random.default_rng([scene.seed, 7])
        self._left = np.full(scene.requests, 0 if scene.answers else np.iinfo(np.int64).max)

    def now(self) -> tuple[NDArray[np.int64], bool]:
        """Rows of the texts, and whether they are of requests that have just come."""
        come = bool(self._answers) and not (self._left > 0).any()
        if come:
            assert self._answers is not None
            fewest, most = self._answers
            self._left = self._random.integers(fewest, most + 1, len(self._left))
        return np.flatnonzero(self._left > 0), come

    def wrote(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """These have got so many tokens."""
        self._left[rows] -= tokens


def replay(scene: Scene) -> Result:
    """Deterministic. Texts and luck are the same for all rules of a seed."""
    random = np.random.default_rng([scene.seed, scene.requests])
    rule, texts, batches = RULES[scene.rule](scene, random), _texts(scene), Batches(scene)
    stale, have = np.ones((scene.requests, POSITIONS)), False
    rows, first = np.empty((scene.steps, 5)), []
    for number in range(scene.steps):
        curve = scene.curve if scene.later is None or number < scene.steps // 3 else scene.later
        texts.rows, come = batches.now()
        if come:
            first.append(number)
            rule.came(len(texts.rows))
            stale, have = np.ones_like(stale), False
        requests, confidences = len(texts.rows), texts.confidences()
        chances = texts.chances() if isinstance(texts, MadeUp) else confidences
        step = Step(texts.rows, confidences, stale[texts.rows], chances, have, scene.context, curve)
        drafts, drafting = rule.decide(step)
        accepted, verified = texts.accepted(drafts), int(drafts.sum())
        tokens = requests + texts.gained(drafts)
        texts.advance(accepted + 1)
        batches.wrote(texts.rows, accepted + 1)
        verify_s = float(curve.verify_s(requests + verified, scene.context)) * (1.0 + scene.unmeasured * have)
        draft_s = curve.draft_s(requests) if drafting else 0.0
        rows[number] = tokens, verify_s + draft_s, verified, drafting, requests
        seen = [time * np.exp(NOISE * random.standard_normal()) for time in (verify_s, draft_s)]
        if random.random() < STALLS:
            seen[0] *= STALL
        rule.learn(step, drafts, accepted, *seen)
        if have:
            stale[texts.rows] = confidences
        have = drafting
    warm = int(WARM * scene.steps)
    if scene.answers:  # whole batches: their ends are slower than their beginnings
        rows, warm = rows[: first[-1]], next(number for number in first if number >= warm)
    return summed(rows, warm)


def summed(rows: NDArray[np.float64], warm: int) -> Result:
    """rows: [steps, 5], of each step tokens, seconds, drafts verified, whether it drafted, and requests; warm: how many
    of them do not count."""
    tokens, seconds, verified, drafted, requests = rows[warm:].T
    return Result(
        throughput=float(tokens.sum() / seconds.sum()),
        whole=float(rows[:, 0].sum() / rows[:, 1].sum()),
        accepted_length=float(tokens.sum() / requests.sum()),
        verified=float(verified.sum() / requests.sum()),
        drafted=float(drafted.mean()),
    )


def length(steps: int) -> int:
    """Places of the texts for so many steps."""
    return min(1 + (1 + POSITIONS) * steps, LONGEST)


def _texts(scene: Scene) -> Texts:
    if scene.recorded:
        return Recorded.of(scene.requests, scene.seed)
    return MadeUp.of(
        scene.requests,
        scene.places or length(scene.steps),
        scene.seed,
        scene.reading,
        hard=scene.hard,
        harder=scene.harder,
        raw=scene.raw,
    )


RULES.update(
    {
        "none": lambda scene, random: Always(0),
        "fixed 5": lambda scene, random: Always(POSITIONS),
        "vLLM's rule": lambda scene, random: Upstream(measured(scene.curve, scene.measured_at, scene.requests, random)),
        "early stop": lambda scene, random: Ours(
            "early-stop", measured(scene.curve, scene.measured_at, scene.requests, random)
        ),
        "delayed": lambda scene, random: Ours(
            "delayed", measured(scene.curve, scene.measured_at, scene.requests, random)
        ),
        "ahead": lambda scene, random: Ahead(
            measured(scene.curve, scene.measured_at, scene.requests, random), scene.requests
        ),
        "oracle": lambda scene, random: Oracle(),
    }
)
