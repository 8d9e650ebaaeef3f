"""Every concurrency from 1 to 256: ours and vLLM's rule beside the better of none and fixed 5.

Requests with a fixed number of drafts do not meet: one run of 256 of them tells what any number of them came to. What
decides about drafts runs at each concurrency by itself, over the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from budgets.curves import POSITIONS, Curve, Reading
from budgets.replay import WARM, Scene, length, replay
from budgets.texts import MOST, MadeUp

Floats = NDArray[np.float64]
RULES = ("vLLM's rule", "early stop", "delayed", "ahead")
SEED = 1
DIGITS = 5


def steps_at(requests: int, steps: int) -> int:
    """Twice as many where a step says little, and half as many where it says much."""
    return 2 * steps if requests <= 16 else steps if requests <= 64 else steps // 2


def gains(work: tuple[str, Curve, int, int]) -> dict[str, tuple[float, float]]:
    """Of each rule over the better of none and fixed 5, and the drafts it verifies a request and step.

    work: the curve's name, the curve, requests, and steps as `steps_at` gets them.
    """
    name, curve, requests, steps = work
    reading: Reading = "tokens" if "tokens" in name else "drafts"
    count = steps_at(requests, steps)
    fixed = float(fixed_tokens(count, reading)[requests - 1]) / _fixed_s(curve, requests)
    none = requests / float(curve.verify_s(requests, 0.0))
    found = {}
    for rule in RULES:
        done = replay(Scene(requests, rule, reading, curve, steps=count, seed=SEED))
        found[rule] = round(done.throughput / max(fixed, none) - 1.0, DIGITS), round(done.verified, 3)
    return found


@cache
def fixed_tokens(steps: int, reading: Reading) -> Floats:
    """[256]: tokens a step of 1, 2, ... requests that verify all of 5 drafts, after `WARM`, as `replay` counts them."""
    texts = MadeUp.of(MOST, length(steps), SEED, reading)
    texts.advance(texts.accepted(np.zeros(MOST, np.int64)) + 1)  # a first step without drafts
    all_of_them, total = np.full(MOST, POSITIONS), np.zeros(MOST)
    for number in range(1, steps):
        if number >= int(WARM * steps):
            total += 1.0 + np.cumprod(texts.chances(), axis=1).sum(axis=1)
        texts.advance(texts.accepted(all_of_them) + 1)
    return np.cumsum(total) / (steps - int(WARM * steps))


def _fixed_s(curve: Curve, requests: int) -> float:
    return float(curve.verify_s((1 + POSITIONS) * requests, 0.0)) + curve.draft_s(requests)


def together(
    curves: dict[str, Curve],
    levels: Iterable[int],
    steps: int,
    run: Callable[[list[tuple[str, Curve, int, int]]], Iterable[dict[str, tuple[float, float]]]],
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """By curve and rule, `gain` and `verified` at each level in order. `run`: `gains` of each of a list, in order."""
    work = [(name, curve, level, steps) for name, curve in curves.items() for level in levels]
    found: dict[str, dict[str, dict[str, list[float]]]] = {
        name: {rule: {"gain": [], "verified": []} for rule in RULES} for name in curves
    }
    for (name, *_), by_rule in zip(work, run(work), strict=True):
        for rule, (gain, verified) in by_rule.items():
            found[name][rule]["gain"].append(gain)
            found[name][rule]["verified"].append(verified)
    return found
