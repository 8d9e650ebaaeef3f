"""Runs a rule over texts and curves, and adds up what it wrote in how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from budgets.curves import POSITIONS, Curve, Reading, fitted
from budgets.rules import Ahead, Always, Oracle, Ours, Rule, Step, Upstream, measured
from budgets.texts import MadeUp, overconfident

NOISE, STALLS, STALL = 0.03, 0.01, 30.0
"""Of times that an engine observes: their deviation, how many are stalls, and how many times longer these last."""
WARM = 0.25
"""Part of the steps that is not counted: what is lost while learning is reported apart."""

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
    harder: float = 0.0
    """See MadeUp."""
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


def replay(scene: Scene) -> Result:
    """Deterministic. Texts and luck are the same for all rules of a seed."""
    random = np.random.default_rng([scene.seed, scene.requests])
    rule = RULES[scene.rule](scene, random)
    length = 1 + (1 + POSITIONS) * scene.steps
    texts = MadeUp.of(scene.requests, min(length, 4000), scene.seed, scene.reading, scene.harder)
    stale, have = np.ones((scene.requests, POSITIONS)), False
    rows = []
    for number in range(scene.steps):
        curve = scene.curve if scene.later is None or number < scene.steps // 3 else scene.later
        chances = texts.chances()
        confidences = overconfident(chances) if scene.raw else chances
        step = Step(confidences, stale, chances, have, scene.context, curve)
        drafts, drafting = rule.decide(step)
        accepted = texts.accepted(drafts)
        texts.advance(accepted + 1)
        alive = np.cumprod(chances, axis=1) * (np.arange(POSITIONS) < drafts[:, None])
        verify_s = float(curve.verify_s(scene.requests + int(drafts.sum()), scene.context))
        draft_s = curve.draft_s(scene.requests) if drafting else 0.0
        rows.append((scene.requests + alive.sum(), verify_s + draft_s, drafts.sum(), drafting))
        seen = [time * np.exp(NOISE * random.standard_normal()) for time in (verify_s, draft_s)]
        if random.random() < STALLS:
            seen[0] *= STALL
        rule.learn(step, drafts, accepted, *seen)
        if have:
            stale = confidences
        have = drafting
    return _result(np.array(rows, dtype=np.float64), scene)


def _result(rows: NDArray[np.float64], scene: Scene) -> Result:
    tokens, seconds, verified, drafted = rows[int(WARM * scene.steps) :].T
    return Result(
        throughput=float(tokens.sum() / seconds.sum()),
        whole=float(rows[:, 0].sum() / rows[:, 1].sum()),
        accepted_length=float(tokens.mean() / scene.requests),
        verified=float(verified.mean() / scene.requests),
        drafted=float(drafted.mean()),
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
